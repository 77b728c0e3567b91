"""Linear recurrences over time, computed in parallel: elementwise states and convolution windows."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlxf.attention.recurrent.base import EpisodeRuns, expand_as

BLOCK = 32
"""Tokens whose prefix products are computed together; 16 to 64 take similar time on a CPU."""


def linear_scan(decay: Tensor, x: Tensor, state: Tensor) -> Tensor:
    """Compute ``h_t = decay_t * h_(t-1) + x_t`` for all t, with ``h_0 = state``.

    Products of decays are only taken over increasing ranges, and no decay is divided by or taken to the
    logarithm: a decay of 0 resets the state exactly. The cost is linear in T.

    Args:
        decay: (B, T, ...), broadcastable to x.
        x: (B, T, ...), real or complex.
        state: (B, ...), h_0.

    Returns:
        h_1 ... h_T, (B, T, ...), in the dtype of the state.
    """
    states: Tensor = _LinearScan.apply(decay.to(state.dtype), x.to(state.dtype), state)  # type: ignore[no-untyped-call]
    return states


class _LinearScan(torch.autograd.Function):
    """`linear_scan`, whose backward pass is a scan in reverse order over the saved states."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, x: Tensor, state: Tensor) -> Tensor:
        carried = torch.cat([x[:, :1] + decay[:, :1] * state[:, None], x[:, 1:]], dim=1)
        states = _inclusive_scan(decay, carried)[1]
        ctx.save_for_backward(decay, states, state)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decay, states, state = ctx.saved_tensors
        decay = decay.conj()
        following = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], dim=1)
        grad_x = _inclusive_scan(following.flip(1), grad.flip(1))[1].flip(1)
        previous = torch.cat([state[:, None], states[:, :-1]], dim=1)
        grad_decay = (grad_x * previous.conj()).sum_to_size(decay.shape)
        return grad_decay, grad_x, decay[:, 0] * grad_x[:, 0]


def _inclusive_scan(decay: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return prefix products of the decays and the states from a zero state, (B, T, ...) each."""
    length = x.shape[1]
    if length == 1:
        return decay, x
    blocks = -(-length // BLOCK)
    size = length if blocks == 1 else BLOCK
    decay, x = (_pad_time(each, blocks * size).unflatten(1, (blocks, size)) for each in (decay, x))
    shift = 1
    while shift < size:
        x = torch.cat([x[:, :, :shift], x[:, :, shift:] + decay[:, :, shift:] * x[:, :, :-shift]], dim=2)
        decay = torch.cat([decay[:, :, :shift], decay[:, :, shift:] * decay[:, :, :-shift]], dim=2)
        shift *= 2
    if blocks > 1:
        products, carried = _inclusive_scan(decay[:, :, -1], x[:, :, -1])
        first = torch.ones_like(products[:, :1]), torch.zeros_like(carried[:, :1])
        before, carry = (
            torch.cat([a, b[:, :-1]], dim=1) for a, b in zip(first, (products, carried), strict=True)
        )
        x, decay = x + decay * carry[:, :, None], decay * before[:, :, None]
    return decay.flatten(1, 2)[:, :length], x.flatten(1, 2)[:, :length]


def _pad_time(x: Tensor, length: int) -> Tensor:
    """Pad x (B, T, ...) with zeros to (B, length, ...)."""
    padding = x.new_zeros(x.shape[0], length - x.shape[1], *x.shape[2:])
    return torch.cat([x, padding], dim=1) if length > x.shape[1] else x


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, runs: EpisodeRuns, window: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply a depthwise causal convolution within episodes, ``y_t = bias + sum_i weight_i x_(t-W+1+i)``.

    Args:
        x: inputs, (B, T, C).
        weight: taps (C, W); the last one multiplies the current token.
        bias: (C,).
        runs: episodes of the tokens; empty slots are skipped, not convolved.
        window: the W - 1 inputs before the segment, oldest first, (B, W - 1, C), 0 where there were none.

    Returns:
        Outputs (B, T, C), undefined at empty slots, and the window after the segment.
    """
    inputs, window = causal_windows(x, runs, window, weight.shape[1])
    return bias + sum(tap * values for tap, values in zip(weight.T, inputs, strict=True)), window


def causal_windows(x: Tensor, runs: EpisodeRuns, window: Tensor, taps: int) -> tuple[list[Tensor], Tensor]:
    """Return the inputs of a causal convolution with W taps, within episodes.

    Args:
        x: inputs, (B, T, C).
        runs: episodes of the tokens; empty slots are skipped.
        window: the W - 1 inputs before the segment, oldest first, (B, W - 1, C), 0 where there were none.
        taps: number W.

    Returns:
        W tensors (B, T, C), the last one with the tokens themselves, undefined at empty slots, and the
        window after the segment.
    """
    start = window.shape[1]
    padded = torch.cat([window, runs.inputs(x)], dim=1)
    slots = torch.arange(padded.shape[1], device=x.device).expand(len(x), -1)
    valid = torch.cat([torch.ones_like(slots[:, :start], dtype=torch.bool), runs.valid], dim=1)
    number = torch.cat([torch.zeros_like(slots[:, :start]), runs.number], dim=1)
    if x.shape[1] == 1:  # only the last slot may be empty
        latest = torch.where(valid, slots, slots - 1)
    else:
        latest = torch.where(valid, slots, -1).cummax(dim=1).values  # the last valid slot up to each slot
    before = torch.cat([torch.full_like(slots[:, :1], -1), latest[:, :-1]], dim=1)
    chain = [latest]
    for _ in range(taps - 1):
        chain.append(torch.where(chain[-1] < 0, -1, before.gather(1, chain[-1].clamp(min=0))))
    shifted = [_gather_in_episode(padded, slot, number) for slot in reversed(chain)]
    last = torch.cat([window[:, :0], *(values[:, -1:] for values in shifted[1:])], dim=1)
    return [values[:, start:] for values in shifted], last


def _gather_in_episode(x: Tensor, slot: Tensor, number: Tensor) -> Tensor:
    """Gather x (B, S, C) at slots (B, S); 0 where the slot is negative or belongs to another episode."""
    source = slot.clamp(min=0)
    same = (slot >= 0) & (number.gather(1, source) == number)
    return x.gather(1, source[..., None].expand_as(x)) * expand_as(same, x)
