"""Linear recurrences over time, computed in parallel: elementwise states and convolution windows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlxf.attention.recurrent.base import EpisodeRuns, unsqueeze_like

BLOCK = 32
"""Tokens whose prefix products are computed together; 16 to 64 take similar time on a CPU."""


def linear_scan(decay: Tensor, x: Tensor, state: Tensor) -> Tensor:
    """Compute ``h_t = decay_t * h_(t-1) + x_t`` for all t, with ``h_0 = state``.

    Products of decays are only taken over increasing ranges, and no decay is divided by or taken to the
    logarithm: a decay of 0 resets a finite state exactly. The cost is linear in T.

    Args:
        decay: (B, T, ...), broadcastable to x; at most 1 in absolute value.
        x: (B, T, ...), real or complex.
        state: (B, ...), h_0.

    Returns:
        h_1 ... h_T, (B, T, ...), in the dtype of the state.
    """
    return _apply(decay, x, state, DECAYING)


def growing_scan(factor: Tensor, x: Tensor, state: Tensor) -> Tensor:
    """Compute `linear_scan` for factors above 1, with which states may overflow.

    A factor of 0 resets the state exactly, also if it is infinite or NaN. Factors are multiplied only within
    blocks of `BLOCK` tokens, which are computed one after another. This takes at least twice the time.

    Args:
        factor: (B, T, ...), broadcastable to x; at most 2, so that products over a block are finite.
        x: see `linear_scan`.
        state: see `linear_scan`.
    """
    return _apply(factor, x, state, GROWING)


@dataclass(frozen=True)
class _Method:
    """Products of a scan, and the states that its blocks begin with.

    Args:
        product: product of states with factors that broadcast to them.
        carries: states before each of N blocks, given their factors and their last states (B, N, ...).
    """

    product: Callable[[Tensor, Tensor], Tensor]
    carries: Callable[[Tensor, Tensor], Tensor]


def _exact_product(x: Tensor, factor: Tensor) -> Tensor:
    """Return x times a factor; 0 where the factor is 0, also if x is not finite."""
    return (x * factor).masked_fill_(factor == 0, 0)


def _parallel_carries(decay: Tensor, x: Tensor) -> Tensor:
    start = torch.zeros_like(x[:, 0])
    return torch.cat([start[:, None], _scan(decay[:, :-1], x[:, :-1], start, DECAYING)], dim=1)


def _successive_carries(factor: Tensor, x: Tensor) -> Tensor:
    carries = [torch.zeros_like(x[:, 0])]
    for each, last in zip(factor[:, :-1].unbind(1), x[:, :-1].unbind(1), strict=True):
        carries.append(last + _exact_product(carries[-1], each))
    return torch.stack(carries, dim=1)


DECAYING = _Method(torch.mul, _parallel_carries)
GROWING = _Method(_exact_product, _successive_carries)


def _apply(factor: Tensor, x: Tensor, state: Tensor, method: _Method) -> Tensor:
    factor, x = factor.to(state.dtype), x.to(state.dtype)
    states: Tensor = _LinearScan.apply(factor, x, state, method)  # type: ignore[no-untyped-call]
    return states


class _LinearScan(torch.autograd.Function):
    """`linear_scan`, whose backward pass is a scan in reverse order over the saved states."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, x: Tensor, state: Tensor, method: _Method) -> Tensor:
        states = _scan(decay, x, state, method)
        ctx.save_for_backward(decay, states, state)
        ctx.method = method
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        decay, states, state = ctx.saved_tensors
        decay = decay.conj()
        following = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], dim=1)
        grad_x = _scan(following.flip(1), grad.flip(1), torch.zeros_like(state), ctx.method).flip(1)
        previous = torch.cat([state[:, None], states[:, :-1]], dim=1)
        grad_decay = (grad_x * previous.conj()).sum_to_size(decay.shape)
        return grad_decay, grad_x, ctx.method.product(grad_x[:, 0], decay[:, 0]), None


def _scan(decay: Tensor, x: Tensor, state: Tensor, method: _Method) -> Tensor:
    """Return h_1 ... h_T of `linear_scan`: in parallel within blocks, then from block to block."""
    length = x.shape[1]
    product = method.product
    first = x[:, :1] + product(state, decay[:, 0])[:, None]
    if length == 1:
        return first
    x = torch.cat([first, x[:, 1:]], dim=1)
    size = min(length, BLOCK)
    decay, x = (_pad_time(each, -(-length // size) * size).unflatten(1, (-1, size)) for each in (decay, x))
    shift = 1
    while shift < size:
        x = torch.cat(
            [x[:, :, :shift], x[:, :, shift:] + product(x[:, :, :-shift], decay[:, :, shift:])], dim=2
        )
        decay = torch.cat([decay[:, :, :shift], decay[:, :, shift:] * decay[:, :, :-shift]], dim=2)
        shift *= 2
    if x.shape[1] > 1:
        x = x + product(method.carries(decay[:, :, -1], x[:, :, -1])[:, :, None], decay)
    return x.flatten(1, 2)[:, :length]


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
        x: inputs, (B, T, C), with T of at least 1.
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
    current = number[:, start:]
    inputs = [_gather_in_episode(padded, slot[:, start:], number, current) for slot in reversed(chain)]
    last = torch.cat([window[:, :0], *(values[:, -1:] for values in inputs[1:])], dim=1)
    return inputs, last


def _gather_in_episode(x: Tensor, slot: Tensor, number: Tensor, current: Tensor) -> Tensor:
    """Return the values of x at slots, (B, T, C), 0 at negative slots and at those of another episode.

    Args:
        x: values, (B, S, C).
        slot: slots, (B, T).
        number: numbers of the episodes of x, (B, S).
        current: numbers of the episodes that may be read, (B, T).
    """
    source = slot.clamp(min=0)
    same = (slot >= 0) & (number.gather(1, source) == current)
    return x.gather(1, source[..., None].expand(-1, -1, x.shape[2])) * unsqueeze_like(same, x)
