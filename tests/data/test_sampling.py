"""Tests of the probabilities with which windows are drawn, and of the split into held-out episodes."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rlxf.agents.mlp import BehaviorCloning
from rlxf.data import (
    SAMPLINGS,
    EpisodeWindows,
    HighReturns,
    ReturnWeighted,
    UniformEpisodes,
    UniformSteps,
    Windows,
    return_to_go,
)
from rlxf.data.sampling import SamplingScheme
from rlxf.data.splits import split_episodes
from tests.agents.decision_transformer.worlds import some_trajectories

LENGTHS = (9, 1, 4, 14)
DRAWS = 40_000


def slow_probabilities(data, sampling, episodes):
    """Return the probability of each step of the data, by the formulas of the docstrings."""
    returns = {e: float(data.returns[e]) for e in episodes}
    low, high = min(returns.values()), max(returns.values())
    weights = np.zeros(data.steps)
    for e in episodes:
        for step in range(data.offsets[e], data.offsets[e + 1]):
            if sampling == UniformSteps():
                weights[step] = 1
            elif sampling == UniformEpisodes():
                weights[step] = 1 / data.lengths[e]
            elif isinstance(sampling, HighReturns):
                weights[step] = returns[e] >= high - sampling.range_fraction * (high - low)
            else:
                weights[step] = np.exp((returns[e] - low) / (high - low) / sampling.temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("episodes", [None, [0, 2, 3]])
@pytest.mark.parametrize(
    "sampling",
    [
        *(UniformSteps(), UniformEpisodes(), ReturnWeighted(0.5), ReturnWeighted(3.0)),
        *(HighReturns(0.4), HighReturns(0.9), HighReturns(1)),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:sampling=HighReturns")
def test_steps_are_drawn_with_the_probabilities_of_the_formula(sampling, episodes):
    data = some_trajectories(lengths=LENGTHS)
    windows = Windows(data, 3)
    if episodes is not None:
        windows = windows.of_episodes(np.array(episodes))
    drawn = windows.with_sampling(sampling).draw(DRAWS, torch.Generator().manual_seed(0))
    frequencies = np.bincount(drawn.numpy(), minlength=data.steps) / DRAWS
    expected = slow_probabilities(data, sampling, range(data.episodes) if episodes is None else episodes)
    assert (frequencies[expected == 0] == 0).all()
    assert (np.abs(frequencies - expected) < 5 * np.sqrt(expected / DRAWS) + 1e-12).all()


def test_uniform_steps_do_not_change_the_random_stream():
    data = some_trajectories(lengths=LENGTHS)
    draws = [
        windows.draw(20, torch.Generator().manual_seed(1)).tolist()
        for windows in (Windows(data, 3), Windows(data, 3).with_sampling(UniformSteps()))
    ]
    assert (
        draws[0] == draws[1] == torch.randint(28, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    )


def test_low_temperatures_draw_the_best_episode_only():
    data = some_trajectories(lengths=LENGTHS)
    drawn = Windows(data, 3).with_sampling(ReturnWeighted(1e-3)).draw(200)
    best = int(data.returns.argmax())
    assert set(np.searchsorted(data.offsets, drawn.numpy(), side="right") - 1) == {best}


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_temperature_does_not_depend_on_the_scale_of_rewards(scale):
    lengths, returns = np.array([3, 5]), np.array([1.0, 2.0], np.float32)
    weights = ReturnWeighted(0.3).episode_weights(lengths, scale * returns)
    np.testing.assert_allclose(weights, ReturnWeighted(0.3).episode_weights(lengths, returns), rtol=1e-5)


@pytest.mark.parametrize("sampling", [ReturnWeighted(0.3), HighReturns()], ids=repr)
@pytest.mark.filterwarnings("ignore:sampling=HighReturns")
def test_the_best_episode_is_always_drawn_and_units_do_not_matter(sampling):
    lengths, returns = np.full(40, 7), np.random.default_rng(0).normal(size=40).astype(np.float32)
    chosen = [
        sampling.episode_weights(lengths, scale * returns + shift) for scale, shift in ((1, 0), (50, 9))
    ]
    np.testing.assert_allclose(*chosen, rtol=1e-3)
    assert chosen[0][returns.argmax()] == chosen[0].max()


@pytest.mark.parametrize("high", [1, 9])
def test_few_high_returns_are_reported(high):
    returns = np.r_[np.zeros(50 - high), np.ones(high)].astype(np.float32)
    with pytest.warns(
        UserWarning, match=rf"uses {high} of 50 episodes, .* a larger range_fraction uses more"
    ):
        weights = HighReturns(0.5).episode_weights(np.full(50, 3), returns)
    assert weights.tolist() == [0.0] * (50 - high) + [3.0] * high


@pytest.mark.parametrize("tenths", range(1, 11))
def test_returns_at_the_threshold_are_high(tenths):
    returns = np.repeat(np.arange(11, dtype=np.float32) / 10, 20)
    weights = HighReturns(tenths / 10).episode_weights(np.ones(220, np.int64), returns)
    assert weights.sum() == 20 * (tenths + 1)


def test_enough_high_returns_are_not_reported():
    returns = np.r_[np.zeros(40), np.ones(10)].astype(np.float32)
    assert HighReturns().episode_weights(np.full(50, 3), returns).sum() == 30
    assert HighReturns(1).episode_weights(np.array([3, 4]), np.array([0, 1], np.float32)).tolist() == [3, 4]


@pytest.mark.parametrize("length", [1, 4, 30])
@pytest.mark.parametrize("episodes", [None, [0, 2, 3]])
@pytest.mark.parametrize("sampling", [UniformSteps(), UniformEpisodes(), ReturnWeighted()], ids=repr)
def test_steps_of_windows_that_divide_episodes_have_the_probabilities_of_the_formula(
    sampling, episodes, length
):
    data = some_trajectories(lengths=LENGTHS)
    windows = EpisodeWindows(data, length)
    if episodes is not None:
        windows = windows.of_episodes(np.array(episodes))
    batch = windows.with_sampling(sampling).sample(DRAWS // 2, torch.Generator().manual_seed(0))
    observations = {row.tobytes(): step for step, row in enumerate(data.observations)}
    time = batch.time_steps - batch.time_steps.amax(dim=1, keepdim=True) // length * length
    in_loss = batch.observations[batch.mask & (time >= 0)].numpy()
    found = np.bincount([observations[row.tobytes()] for row in in_loss], minlength=data.steps)
    expected = slow_probabilities(data, sampling, range(len(LENGTHS)) if episodes is None else episodes)
    np.testing.assert_allclose(found / found.sum(), expected, atol=0.01)


@pytest.mark.parametrize("kind", [Windows, EpisodeWindows])
def test_a_scheme_replaces_an_earlier_one_and_other_episodes_start_without(kind):
    windows = kind(some_trajectories(lengths=LENGTHS), 3)
    weighted, some = windows.with_sampling(ReturnWeighted(0.1)), np.array([0, 2])

    def drawn(each):
        return each.draw(50, torch.Generator().manual_seed(0)).tolist()

    assert drawn(weighted) != drawn(windows)
    assert drawn(weighted.with_sampling(UniformSteps())) == drawn(windows)
    assert drawn(weighted.of_episodes(some)) == drawn(windows.of_episodes(some))


def equal_returns():
    rewards = np.ones(12, np.float32)
    togo = np.concatenate([return_to_go(np.ones(3))] * 4).astype(np.float32)
    return some_trajectories(lengths=(3,) * 4, rewards=rewards, return_to_go=togo)


def test_returns_that_differ_by_rounding_cannot_be_weighted():
    """Sums of 53 rewards of 0.3 and a single reward of 15.9 differ in float32."""
    rewards = [np.full(53, np.float32(0.3)), np.r_[np.zeros(52), np.float32(15.9)]]
    returns = np.array([return_to_go(each)[0] for each in rewards], np.float32)
    assert returns[0] != returns[1]
    with pytest.raises(ValueError, match=r"all 2 episodes to train on have the return 15\.9"):
        ReturnWeighted().episode_weights(np.array([53, 53]), returns)


def test_equal_returns_cannot_be_weighted():
    for sampling in (ReturnWeighted(), HighReturns()):
        message = rf"sampling={re.escape(str(sampling))} .* all 4 episodes .* return 3; use .*UniformSteps"
        with pytest.raises(ValueError, match=message):
            BehaviorCloning(equal_returns(), sampling=sampling, device="cpu")
    BehaviorCloning(equal_returns(), sampling=UniformEpisodes(), device="cpu")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ReturnWeighted(0), ValueError, "temperature must be above 0, got 0"),
        (lambda: ReturnWeighted(-1.0), ValueError, "temperature must be above 0, got -1"),
        (lambda: ReturnWeighted(float("inf")), ValueError, "temperature must be finite"),
        (lambda: ReturnWeighted("1"), TypeError, "temperature must be a number, got '1'"),
        (lambda: HighReturns(0), ValueError, "range_fraction must be above 0 and at most 1, got 0"),
        (lambda: HighReturns(1.5), ValueError, "range_fraction must be above 0 and at most 1, got 1.5"),
        (lambda: HighReturns(float("nan")), ValueError, "range_fraction must be finite, got nan"),
        (lambda: HighReturns(True), TypeError, "range_fraction must be a number, got True"),
    ],
)
def test_bad_schemes_are_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


@dataclass(frozen=True)
class Weights(SamplingScheme):
    """Scheme with given weights of episodes."""

    weights: tuple[float, ...]

    def episode_weights(self, lengths, returns):
        return np.array(self.weights)


@pytest.mark.parametrize("kind", [Windows, EpisodeWindows])
@pytest.mark.parametrize(
    "weights", [(0, 0, 0), (1, -1, 1), (-1, -1, -1), (1, np.nan, 1), (1, np.inf, 1), (1, 1)], ids=repr
)
def test_invalid_weights_of_episodes_are_errors(kind, weights):
    windows = kind(some_trajectories(lengths=(2, 3, 4)), 2)
    with pytest.raises(ValueError, match="must weight 3 episodes by finite numbers of at least 0, not all 0"):
        windows.with_sampling(Weights(weights))


def test_episodes_of_weight_0_are_not_drawn():
    windows = Windows(some_trajectories(lengths=(2, 3, 4)), 2).with_sampling(Weights((0, 5, 0)))
    assert set(windows.draw(200, torch.Generator().manual_seed(0)).tolist()) == {2, 3, 4}


def test_agents_need_a_sampling_scheme():
    with pytest.raises(TypeError, match=r"sampling must be one of UniformSteps\(\), .*, got 'uniform'"):
        BehaviorCloning(some_trajectories(), sampling="uniform", device="cpu")


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.filterwarnings("ignore:sampling=HighReturns")
def test_agents_keep_their_sampling_in_files(tmp_path, name):
    options = {"ReturnWeighted": [0.25], "HighReturns": [0.4]}.get(name, [])
    sampling = SAMPLINGS[name](*options)
    BehaviorCloning(some_trajectories(), sampling=sampling, device="cpu").save(tmp_path / "agent.zip")
    assert BehaviorCloning.load(tmp_path / "agent.zip", device="cpu").sampling == sampling


@pytest.mark.parametrize(
    ("count", "share", "held_out"), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.1, 1), (10, 0.25, 2), (100, 0.3, 30)]
)
def test_both_parts_of_a_split_have_episodes(count, share, held_out):
    training, validation = split_episodes(np.arange(count), share, seed=0)
    assert len(validation) == held_out
    assert sorted([*training, *validation]) == list(range(count))
    assert (np.diff(training) > 0).all()
    assert (np.diff(validation) > 0).all()


def test_a_split_depends_on_its_seed_only():
    splits = [split_episodes(np.arange(50), 0.2, seed)[1].tolist() for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]


@pytest.mark.parametrize(
    ("count", "share", "error", "message"),
    [
        (
            1,
            0.5,
            ValueError,
            "holds out episodes, which needs at least two, got 1: use validation_fraction=None",
        ),
        (9, 0, ValueError, "validation_fraction must be above 0 and below 1, got 0"),
        (9, 1.0, ValueError, "validation_fraction must be above 0 and below 1, got 1.0"),
        (9, float("nan"), ValueError, "validation_fraction must be finite, got nan"),
        (9, "half", TypeError, "validation_fraction must be a number, got 'half'"),
    ],
)
def test_impossible_splits_are_errors(count, share, error, message):
    with pytest.raises(error, match=message):
        split_episodes(np.arange(count), share, seed=0)


def test_windows_of_a_split_have_the_steps_of_their_episodes():
    data = some_trajectories(lengths=LENGTHS)
    parts = Windows(data, 3).split(0.5, seed=1)
    seen = [set(part.draw(2_000, torch.Generator().manual_seed(0)).tolist()) for part in parts]
    assert seen[0] & seen[1] == set()
    assert seen[0] | seen[1] == set(range(data.steps))
    for part, steps in zip(parts, seen, strict=True):
        batches = list(part.iterate_once(2))
        assert sum(int(batch.mask.sum()) for batch in batches) == len(steps)
