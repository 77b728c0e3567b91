"""Contracts of every recurrent mixer: step = segment, causality, isolation of episodes, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.attention.recurrent.base import EpisodeRuns
from rlxf.attention.recurrent.scan import growing_scan, linear_scan
from rlxf.attention.token_index import EMPTY, TokenIndex
from tests.attention.recurrent.mixers import TECHNIQUES, WIDTH, build, by_steps, differentiable
from tests.attention.worlds import ANYWHERE, random_index, segmented_index

each = pytest.mark.parametrize("name", TECHNIQUES)
NONE = torch.full((2,), EMPTY)


@each
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@given(drawn=segmented_index(moves=ANYWHERE))
@settings(max_examples=10)
def test_steps_equal_segments(name, dtype, tolerance, drawn):
    index, lengths = drawn
    mixer, x = build(name, dtype), torch.randn(*index.shape, WIDTH, dtype=dtype)
    stepped, last = by_steps(mixer, x, index, mixer.initial_state(2), NONE)
    state, episode, start = mixer.initial_state(2), NONE, 0
    for length in lengths:
        part = slice(start, start + length)
        now, filled = index.at(part), index.at(part).episode != EMPTY
        y, state = mixer(x[:, part], EpisodeRuns.of(now, episode), state)
        torch.testing.assert_close(y[filled], stepped[:, part][filled], rtol=tolerance, atol=tolerance)
        episode = torch.where(filled, now.episode, EMPTY).amax(dim=1).maximum(episode)
        start += length
    for key in last:
        torch.testing.assert_close(state[key], last[key], rtol=tolerance, atol=tolerance)


@each
def test_outputs_do_not_depend_on_later_tokens(name):
    mixer, changes = build(name), 0
    for seed in range(40):
        index = random_index(2, 12, seed, ANYWHERE)
        x = torch.randn(*index.shape, WIDTH, dtype=torch.float64)
        changed = int(torch.randint(12, ()))
        other = x.clone()
        other[:, changed] += 1
        runs, state = EpisodeRuns.of(index, NONE), mixer.initial_state(2)
        before, after = mixer(x, runs, state)[0], mixer(other, runs, state)[0]
        assert torch.equal(before[:, :changed], after[:, :changed])
        changes += not torch.equal(before[:, changed:], after[:, changed:])
    assert changes > 20, "the outputs from the changed token on"


@each
def test_no_output_or_gradient_crosses_an_episode_boundary(name):
    mixer, boundary = build(name), 7
    position = torch.cat([torch.arange(boundary), torch.arange(5)]).expand(2, -1)
    episode = (torch.arange(12) >= boundary).long().expand(2, -1)
    runs = EpisodeRuns.of(TokenIndex(position, episode), torch.zeros(2, dtype=torch.long))
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64, requires_grad=True)
    state = {key: torch.full_like(value, 1e4) for key, value in mixer.initial_state(2).items()}
    for value in state.values():
        value.requires_grad_()
    y, last = mixer(x, runs, state)
    later = EpisodeRuns.of(TokenIndex(position[:, boundary:], episode[:, boundary:]), NONE)
    fresh, end = mixer(x[:, boundary:], later, mixer.initial_state(2))
    torch.testing.assert_close(y[:, boundary:], fresh, rtol=0, atol=1e-10)
    torch.testing.assert_close(last, end, rtol=0, atol=1e-10)
    gradients = torch.autograd.grad(y[:, boundary:].square().sum(), [x, *state.values()], allow_unused=True)
    assert not gradients[0][:, :boundary].any()
    assert all(gradient is None or not gradient.any() for gradient in gradients[1:])


@each
def test_every_parameter_receives_a_finite_gradient_that_numbers_confirm(name):
    mixer, index = build(name), random_index(2, 9, 3, ANYWHERE)
    runs, filled = EpisodeRuns.of(index, NONE), index.episode != EMPTY
    parameters = dict(mixer.named_parameters())
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    state = {key: torch.randn_like(value) for key, value in mixer.initial_state(2).items()}
    direction = {key: torch.randn_like(value) for key, value in parameters.items()}

    def loss(step: float) -> torch.Tensor:
        moved = {key: value + step * direction[key] for key, value in parameters.items()}
        y, last = torch.func.functional_call(mixer, moved, (x, runs, state))
        return y[filled].square().sum() + sum(part.square().sum() for part in differentiable(last).values())

    gradients = torch.autograd.grad(loss(0.0), list(parameters.values()))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    slope = sum((g * d).sum() for g, d in zip(gradients, direction.values(), strict=True))
    with torch.no_grad():
        measured = (loss(1e-6) - loss(-1e-6)) / 2e-6
    torch.testing.assert_close(measured, slope, rtol=1e-5, atol=1e-5)


@each
def test_gradients_reach_the_state_before_a_segment(name):
    mixer, index = build(name), TokenIndex.range(2, 4, start=3)
    state = {
        key: torch.randn_like(value).abs().requires_grad_() for key, value in mixer.initial_state(2).items()
    }
    runs = EpisodeRuns.of(index, index.episode[:, 0])
    y, _ = mixer(torch.randn(2, 4, WIDTH, dtype=torch.float64), runs, state)
    inputs = list(differentiable(state).values()) or [state["total"]]
    gradients = torch.autograd.grad(y[:, 0].square().sum(), inputs, allow_unused=True)
    assert all(gradient is not None and (gradient.any() or not gradient.numel()) for gradient in gradients)


@each
def test_states_stay_finite_over_long_episodes(name):
    mixer = build(name, torch.float32)
    position = torch.arange(4096).expand(2, -1)
    index = TokenIndex(position, torch.zeros_like(position))
    with torch.no_grad():
        y, state = mixer(torch.randn(2, 4096, WIDTH), EpisodeRuns.of(index, NONE), mixer.initial_state(2))
    assert y.isfinite().all()
    assert all(value.isfinite().all() for value in state.values())


@each
def test_empty_slots_leave_the_state_unchanged(name):
    mixer = build(name)
    state = {key: torch.randn_like(value) for key, value in mixer.initial_state(2).items()}
    index = TokenIndex.empty(2, 5)
    _, last = mixer(torch.full((2, 5, WIDTH), 1e4, dtype=torch.float64), EpisodeRuns.of(index, NONE), state)
    torch.testing.assert_close(last, state, rtol=0, atol=0)


@pytest.mark.parametrize("scan", [linear_scan, growing_scan])
@given(length=st.integers(1, 100), seed=st.integers(0, 100), complex_=st.booleans())
@settings(max_examples=30)
def test_scan_equals_the_slow_loop(scan, length, seed, complex_):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if complex_ else torch.float64
    decay = torch.randn(2, length, 3, 1, dtype=dtype, generator=generator)
    decay[torch.rand(decay.shape, generator=generator) < 0.2] = 0
    x = torch.randn(2, length, 3, 4, dtype=dtype, generator=generator)
    state = torch.randn(2, 3, 4, dtype=dtype, generator=generator)
    inputs = [each.requires_grad_() for each in (decay, x, state)]
    slow, h = [], state
    for t in range(length):
        h = decay[:, t] * h + x[:, t]
        slow.append(h)
    expected, actual = torch.stack(slow, dim=1), scan(decay, x, state)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn(expected.shape, dtype=dtype, generator=generator)
    gradients = [torch.autograd.grad((y * weight).abs().square().sum(), inputs) for y in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
