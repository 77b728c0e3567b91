"""`InfiniAttention` against public code, in segments and step by step, and against a slow loop."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor, nn

from rlxf.attention import InfiniAttention
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState, RecurrentMixer
from rlxf.attention.recurrent.infini import retrieve
from rlxf.attention.token_index import EMPTY, TokenIndex
from tests.attention.oracle import load, put
from tests.attention.worlds import numbers

VECTOR = load("infini")
UPDATES = pytest.mark.parametrize("update", ["linear", "delta"])


def mixer_of(update: str) -> RecurrentMixer:
    """Return a mixer of projected queries, keys and values, with the gate of the reference vector."""
    _, heads, _, size = VECTOR["in_q"].shape
    mixer = InfiniAttention(int(VECTOR["cfg_segment"]), update).build(heads * size, heads).double()
    mixer.qkv, mixer.output = nn.Identity(), nn.Identity()
    put(mixer.beta, VECTOR["w_beta"])
    return mixer


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def run(mixer: RecurrentMixer, x: Tensor, index: TokenIndex, cuts: list[int]) -> tuple[Tensor, MixerState]:
    """Return the outputs of consecutive segments, and the state after the last one."""
    state, episode, outputs = mixer.initial_state(len(x)), torch.full((len(x),), EMPTY), []
    for start, end in pairwise(accumulate(cuts, initial=0)):
        runs = EpisodeRuns.of(index.at(slice(start, end)), episode)
        y, state = mixer(x[:, start:end], runs, state)
        episode = runs.last_episode
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def joined() -> Tensor:
    """Return queries, keys and values of the reference vector side by side, (B, T, 3 H D)."""
    return torch.cat([merged(VECTOR[f"in_{name}"]) for name in "qkv"], dim=-1)


@UPDATES
@pytest.mark.parametrize("cuts", [[12], [4, 4, 4], [3, 2, 7], [1] * 12], ids=str)
def test_reference_vector(update, cuts):
    x = joined()
    y, _ = run(mixer_of(update), x, TokenIndex.range(*x.shape[:2]), cuts)
    expected = merged(VECTOR[f"out_{update}"])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-9)


@UPDATES
@pytest.mark.parametrize(("count", "suffix"), [(12, "memory"), (4, "memory_after_first")])
def test_memory_of_the_reference_vector(update, count, suffix):
    """The first token of the next segment writes the one before."""
    x = joined()[:, :count]
    x = torch.cat([x, x[:, :1]], dim=1)
    _, state = run(mixer_of(update), x, TokenIndex.range(*x.shape[:2]), [count + 1])
    memory, normalizer = state["memory"][..., :-1], state["memory"][..., -1]
    torch.testing.assert_close(memory, VECTOR[f"out_{update}_{suffix}"], rtol=0, atol=1e-9)
    if count == 12:
        torch.testing.assert_close(normalizer, VECTOR[f"out_{update}_norm"], rtol=0, atol=1e-9)


@UPDATES
def test_positions_may_be_missing(update):
    """Acting equals learning if the first or the last token of a segment is missing."""
    mixer, x = InfiniAttention(3, update).build(8, 2).double(), numbers(2, 9, 8)
    position = torch.tensor([[0, 1, 3, 4, 5, 7, 8, 10, 12], [0, 2, 4, 5, 6, 8, 9, 10, 13]])
    index = TokenIndex(position, torch.zeros_like(position))
    whole, end = run(mixer, x, index, [9])
    for cuts in ([1] * 9, [2, 4, 3]):
        y, state = run(mixer, x, index, cuts)
        torch.testing.assert_close(y, whole, rtol=0, atol=1e-12)
        torch.testing.assert_close(state, end, rtol=0, atol=1e-12)


def sigma(x: Tensor) -> Tensor:
    return nn.functional.elu(x) + 1


def slow_episode(x: Tensor, size: int, update: str, gate: float) -> Tensor:
    """Return the outputs (T, D) of one head for one episode, x (T, 3 D) its queries, keys and values."""
    q, k, v = x.chunk(3, dim=-1)
    memory, normalizer, outputs = x.new_zeros(q.shape[1], v.shape[1]), x.new_zeros(q.shape[1]), []
    for start in range(0, len(x), size):
        end = min(start + size, len(x))
        for t in range(start, end):
            weights = (k[start : t + 1] @ q[t] / q.shape[1] ** 0.5).softmax(0)
            y = weights @ v[start : t + 1]
            if start:
                y = gate * sigma(q[t]) @ memory / (sigma(q[t]) @ normalizer) + (1 - gate) * y
            outputs.append(y)
        added = torch.zeros_like(memory)
        for j in range(start, end):
            old = sigma(k[j]) @ memory / (sigma(k[j]) @ normalizer) if start and update == "delta" else 0
            added += sigma(k[j])[:, None] * (v[j] - old)
        memory, normalizer = memory + added, normalizer + sigma(k[start:end]).sum(0)
    return torch.stack(outputs)


@pytest.mark.parametrize("shift", [-30.0, -200.0, -1e4])
def test_very_negative_queries_read_the_memory(shift):
    """All ``sigma(q)`` are 0 in float32, but their ratios are not."""
    memory = numbers(2, 3, 4, 5, seed=1)
    memory[..., -1] = memory[..., -1].abs()
    near = numbers(2, 3, 6, 4).clamp(max=0).requires_grad_()
    near.data[..., 0] = 0
    far = (near.detach().float() + shift).requires_grad_()
    results = []
    for q, read in ((near, memory), (far, memory.float())):
        value, known = retrieve(q, read)
        assert known.all()
        results.append((value.double(), torch.autograd.grad(value.square().sum(), q)[0].double()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


def test_empty_memories_are_not_read():
    memory = torch.zeros(2, 1, 4, 5)
    memory[1, 0, 2, -1] = 1e-30
    value, known = retrieve(numbers(2, 1, 6, 4).float(), memory)
    assert known[:, 0, 0, 0].tolist() == [False, True]
    assert not value.any()


@UPDATES
@pytest.mark.parametrize("cuts", [[23], [1] * 23, [5, 9, 2, 7]], ids=["one", "steps", "cuts"])
def test_episodes_equal_the_slow_loop(update, cuts):
    lengths, size = [[7, 2, 14], [11, 9, 3]], 3
    mixer = InfiniAttention(size, update).build(4, 1).double()
    mixer.qkv, mixer.output = nn.Identity(), nn.Identity()
    put(mixer.beta, torch.tensor([0.7]))
    x = numbers(2, 23, 12)
    position = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    episode = torch.stack([torch.arange(3).repeat_interleave(torch.tensor(row)) for row in lengths])
    y, _ = run(mixer, x, TokenIndex(position, episode), cuts)
    gate = float(torch.tensor(0.7).double().sigmoid())
    slow = [
        torch.cat([slow_episode(part, size, update, gate) for part in row.split(n)])
        for row, n in zip(x, lengths, strict=True)
    ]
    torch.testing.assert_close(y, torch.stack(slow), rtol=0, atol=1e-9)


def test_memory_reaches_the_start_of_an_episode():
    """The first token of an episode affects an output many segments later."""
    mixer, x = InfiniAttention(4).build(8, 2).double(), numbers(1, 40, 8)
    index, changed = TokenIndex.range(1, 40), x.clone()
    changed[:, 0] += 1
    before, after = (run(mixer, each, index, [40])[0] for each in (x, changed))
    assert ((before - after).abs().amax(-1) > 1e-12).all()
