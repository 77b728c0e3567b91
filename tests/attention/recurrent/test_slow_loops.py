"""Whole mixers of DeltaNet, Gated DeltaNet and GLA against loops that read like the papers, with resets."""

import math

import pytest
import torch
from torch import Tensor

from rlxf.attention.recurrent.base import EpisodeRuns, MixerState
from rlxf.attention.token_index import EMPTY
from tests.attention.recurrent.mixers import HEADS, TECHNIQUES, WIDTH, build
from tests.attention.worlds import ANYWHERE, random_index

SIZE = WIDTH // HEADS
LAST = torch.tensor([0, 3])
"""Episode of the token before the segment, by row; some of the drawn rows continue it."""


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def length_1(x: Tensor) -> Tensor:
    return x / math.sqrt(float(x @ x) + 1e-6)


def mean_square_1(x: Tensor) -> Tensor:
    return x / math.sqrt(float(x @ x) / len(x) + 1e-6)


def heads_of(x: Tensor) -> list[Tensor]:
    return [x[head * SIZE : (head + 1) * SIZE] for head in range(HEADS)]


def convolved(mixer, x: Tensor, window: list[Tensor]) -> Tensor:
    """Return the short convolution of the projection of a token and of the tokens before it."""
    w, taps = mixer.convolution.weight, [*window, mixer.qkv.weight @ x]
    return silu(mixer.convolution.bias + sum(w[:, n] * tap for n, tap in enumerate(taps)))


def delta_step(mixer, x: Tensor, states: list[Tensor], window: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """``S = a (I - beta k k^T) S + beta k v^T``, ``y = q S / sqrt(K)`` for each head."""
    q, k, v = convolved(mixer, x, window).chunk(3)
    betas = mixer.spec.max_beta * sigmoid(mixer.beta.weight @ x)
    outputs, following = [], []
    for head, s in enumerate(states):
        key, value, query = length_1(heads_of(k)[head]), heads_of(v)[head], length_1(heads_of(q)[head])
        erase = torch.eye(SIZE) - betas[head] * torch.outer(key, key)
        s = decay(mixer, x, head) * erase @ s + betas[head] * torch.outer(key, value)
        following.append(s)
        outputs.append(mean_square_1(query @ s / math.sqrt(SIZE)))
    y = torch.cat(outputs)
    if hasattr(mixer, "output_gate"):
        y = silu(mixer.output_gate.weight @ x) * y
    return mixer.output.weight @ y, following


def decay(mixer, x: Tensor, head: int) -> Tensor | float:
    """``a = exp(-A softplus(x W_a + b))`` of Gated DeltaNet; 1 in DeltaNet."""
    if not hasattr(mixer, "time_step"):
        return 1.0
    step = mixer.time_step.weight[head] @ x + mixer.time_step.bias[head]
    return torch.exp(-torch.exp(mixer.log_rate[head]) * torch.log(1 + torch.exp(step)))


def gla_step(mixer, x: Tensor, states: list[Tensor], window: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """``S = diag(a) S + k v^T``, ``y = q S / sqrt(K)`` for each head."""
    q, k, v = (mixer.qkv.weight @ x).chunk(3)
    low, high = mixer.decay
    a = sigmoid(high.weight @ (low.weight @ x) + high.bias) ** (1 / mixer.spec.temperature)
    outputs, following = [], []
    for head, s in enumerate(states):
        key, value, query = heads_of(k)[head], heads_of(v)[head], heads_of(q)[head]
        s = torch.diag(heads_of(a)[head]) @ s + torch.outer(key, value)
        following.append(s)
        outputs.append(mean_square_1(query @ s / math.sqrt(SIZE)))
    y = silu(mixer.gate.weight @ x + mixer.gate.bias) * torch.cat(outputs)
    return mixer.output.weight @ y, following


STEPS = {
    "DeltaNet": delta_step,
    "DeltaNet, negative eigenvalues": delta_step,
    "GatedDeltaNet": delta_step,
    "GLA": gla_step,
}


def slow_row(name: str, mixer, x: Tensor, episodes: Tensor, state: MixerState, last: int):
    """Return the outputs of the tokens x (T, C) of one row, its states and its window, token by token."""
    states, window = list(state["state"]), list(state.get("window", []))
    outputs = []
    for token, episode in zip(x, episodes.tolist(), strict=True):
        if episode == EMPTY:
            outputs.append(torch.zeros(WIDTH))
            continue
        if episode != last:
            states, window = ([torch.zeros_like(each) for each in old] for old in (states, window))
        y, states = STEPS[name](mixer, token, states, window)
        window = [*window, mixer.qkv.weight @ token][1:] if window else []
        outputs.append(y)
        last = episode
    return torch.stack(outputs), torch.stack(states), window


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STEPS)
@torch.no_grad()
def test_mixer_equals_the_slow_loop_over_episodes(name, seed):
    mixer, index = build(name), random_index(2, 24, seed, ANYWHERE)
    x = torch.randn(*index.shape, WIDTH)
    before = {key: torch.randn_like(value) for key, value in mixer.initial_state(2).items()}
    y, after = mixer(x, EpisodeRuns.of(index, LAST), before)
    filled = index.episode != EMPTY
    for row in range(2):
        own = {key: value[row] for key, value in before.items()}
        outputs, states, window = slow_row(name, mixer, x[row], index.episode[row], own, int(LAST[row]))
        close = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(y[row][filled[row]], outputs[filled[row]], **close)
        torch.testing.assert_close(after["state"][row], states, **close)
        if "window" in after:
            torch.testing.assert_close(after["window"][row], torch.stack(window), **close)


def test_episodes_of_the_comparison_end_and_continue():
    """Some rows continue the episode before the segment, and all have resets and empty slots inside."""
    runs = [EpisodeRuns.of(random_index(2, 24, seed, ANYWHERE), LAST) for seed in range(3)]
    assert all(((each.reset.sum(1) > 1) & (~each.valid).any(1)).all() for each in runs)
    assert any(bool((each.continues & each.valid).any()) for each in runs)
    assert set(STEPS) <= set(TECHNIQUES)
