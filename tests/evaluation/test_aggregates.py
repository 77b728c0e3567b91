"""Tests of statistics over seeds and tasks, against loops that read like the formulas of the paper."""

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.evaluation import intervals
from rlxf.evaluation.aggregates import (
    interquartile_mean_over_runs,
    intervals_of,
    mean_score,
    median_over_runs,
    median_over_tasks,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
)
from rlxf.evaluation.intervals import Band, stratified_interquartile_mean

few = settings(max_examples=25, deadline=None)
score = st.integers(-20, 20).map(float)
tasks = st.lists(st.lists(score, min_size=1, max_size=6), min_size=1, max_size=4)
AGGREGATES = [
    mean_score,
    median_over_tasks,
    median_over_runs,
    interquartile_mean_over_runs,
    optimality_gap,
]


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 999)


# The formulas


def slow_mean(scores):
    return sum(sum(task) / len(task) for task in scores) / len(scores)


def slow_median_over_tasks(scores):
    return statistics.median(sum(task) / len(task) for task in scores)


def slow_median_over_runs(scores):
    return statistics.median(run for task in scores for run in task)


def slow_interquartile_mean(scores):
    """If tasks have different numbers of runs, repeat the runs until the tasks have equally many."""
    if len(sizes := {len(task) for task in scores}) > 1:
        scores = [task * (4 * math.lcm(*sizes) // len(task)) for task in scores]
    runs = sorted(run for task in scores for run in task)
    cut = len(runs) // 4
    return statistics.mean(runs[cut : len(runs) - cut])


def slow_gap(scores, gamma=1.0):
    total = 0.0
    for task in scores:
        total += sum(min(run, gamma) for run in task) / len(task)
    return gamma - total / len(scores)


SLOW = dict(
    zip(
        AGGREGATES,
        (slow_mean, slow_median_over_tasks, slow_median_over_runs, slow_interquartile_mean, slow_gap),
        strict=True,
    )
)


def slow_probability(x, y):
    total = 0.0
    for task_x, task_y in zip(x, y, strict=True):
        wins = 0.0
        for run_x in task_x:
            for run_y in task_y:
                wins += 1.0 if run_x > run_y else 0.5 if run_x == run_y else 0.0
        total += wins / (len(task_x) * len(task_y))
    return total / len(x)


def slow_profile(scores, tau):
    return sum(sum(run > tau for run in task) / len(task) for task in scores) / len(scores)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@few
@given(tasks)
def test_aggregates_equal_their_formula(aggregate, scores):
    found = aggregate(scores)
    assert found.value == pytest.approx(SLOW[aggregate](scores), abs=1e-9)
    assert found.low <= found.value <= found.high


@few
@given(st.lists(st.tuples(*2 * [st.lists(score, min_size=1, max_size=5)]), min_size=1, max_size=3))
def test_probability_of_improvement_equals_its_formula_and_complements(pairs):
    x, y = zip(*pairs, strict=True)
    found, reverse = probability_of_improvement(x, y), probability_of_improvement(y, x)
    assert found.value == pytest.approx(slow_probability(x, y))
    assert found.value + reverse.value == pytest.approx(1)
    assert 0 <= found.low <= found.value <= found.high <= 1


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e9, 1e300])
@pytest.mark.parametrize("episodes", [[0.95], [0.1, 0.2, 0.3], [0.7, -0.4, -0.2, -0.1]])
def test_means_of_equal_episodes_are_equal_scores_at_any_scale(episodes, scale):
    """The order and the number of the episodes change the rounding of their mean."""
    x, y = scale * np.tile(episodes, (5, 20)), scale * np.tile(episodes[::-1], (5, 7))
    found = probability_of_improvement([x], [y])
    assert found.value == 0.5
    if len(episodes) == 1:
        assert (found.low, found.high) == (0.5, 0.5)
    assert probability_of_improvement([x + 1e-9 * scale], [y]).value == 1


def test_rounding_of_large_episodes_makes_no_difference_to_a_run_of_small_ones():
    """The mean of the large episodes differs from 0.15 by about 1e-8, their rounding error."""
    large, small = [[[1e9, 0.3 - 1e9]]], [[[0.15, 0.15]]]
    assert np.mean(large) != 0.15
    assert probability_of_improvement(large, small).value == 0.5
    assert probability_of_improvement(small, large).value == 0.5


def test_an_outlier_does_not_make_the_scores_of_other_runs_equal():
    assert probability_of_improvement([[3.0, 4.0]], [[1.0, 2.0, -1e18]]).value == 1


@few
@given(tasks, st.lists(st.integers(-25, 25).map(float), min_size=1, max_size=9))
def test_performance_profile_equals_its_formula_and_does_not_increase(scores, thresholds):
    found = performance_profile(scores, sorted(thresholds))
    assert found.value == pytest.approx([slow_profile(scores, tau) for tau in sorted(thresholds)])
    for line in (found.value, found.low, found.high):
        assert (np.diff(line) <= 1e-12).all()
    assert (found.low <= found.value).all()
    assert (found.value <= found.high).all()


def test_profile_is_strict_at_the_threshold():
    assert performance_profile([[1.0, 2.0, 3.0, 4.0]], [0.9, 1.0, 2.5, 4.0]).value.tolist() == [
        1,
        0.75,
        0.5,
        0,
    ]


@few
@given(tasks, st.integers(-25, 25))
def test_gap_is_zero_if_all_scores_reach_the_threshold(scores, gamma):
    reached = [np.maximum(task, gamma) for task in scores]
    found = optimality_gap(reached, gamma)
    assert (found.value, found.low, found.high) == (0, 0, 0)
    assert optimality_gap(scores, gamma).low >= 0


def test_gap_is_linear_below_the_threshold():
    assert optimality_gap([[0.25, 0.75], [3.0]]).value == pytest.approx((0.5 + 0) / 2)


# Intervals


def slow_interval(scores, statistic, resamples, rng):
    """Resample runs of each task, then episodes of each drawn run, in plain loops."""
    values = []
    for _ in range(resamples):
        drawn = []
        for table in scores:
            rows = rng.choices(table, k=len(table))
            drawn.append([statistics.mean(rng.choices(row, k=len(row))) for row in rows])
        values.append(statistic(drawn))
    values.sort()
    return values[round(0.025 * resamples)], values[-round(0.025 * resamples)]


def tables():
    """Return scores of two tasks: 6 runs of 4 episodes, and 5 runs of 3."""
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(6, 1)) + 0.5 * rng.normal(size=(6, 4)),
        1 + rng.normal(size=(5, 1)) + 0.5 * rng.normal(size=(5, 3)),
    ]


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_intervals_equal_a_slow_loop(aggregate, monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 4999)
    found = aggregate(tables())
    slow = slow_interval([table.tolist() for table in tables()], SLOW[aggregate], 3000, random.Random(1))
    width = found.high - found.low
    assert width > 0.1
    assert (found.low, found.high) == pytest.approx(slow, abs=0.1 * width)


def test_interval_of_the_probability_of_improvement_equals_a_slow_loop(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 4999)
    rng, shuffler = np.random.default_rng(0), random.Random(0)
    x, y = rng.normal(0.7, size=8), rng.normal(size=6)
    slow = sorted(
        slow_probability([shuffler.choices([*x], k=8)], [shuffler.choices([*y], k=6)]) for _ in range(4000)
    )
    found = probability_of_improvement([x], [y])
    assert (found.low, found.high) == pytest.approx((slow[100], slow[-100]), abs=0.05)


def test_runs_are_means_over_their_episodes():
    table = np.random.default_rng(0).exponential(size=(5, 20))
    for aggregate in AGGREGATES:
        assert aggregate([table]).value == pytest.approx(aggregate([table.mean(axis=1)]).value)
    # A pooled statistic would count episodes: here, every mean is below 1 and many episodes are above.
    assert optimality_gap([np.array([[0.0, 1.8]])]).value == pytest.approx(1 - 0.9)


def test_episodes_of_one_run_widen_the_interval():
    episodes = np.random.default_rng(0).normal(size=(1, 30))
    assert mean_score([episodes]).high - mean_score([episodes]).low > 0.3
    alone = mean_score([[3.0]])
    assert (alone.low, alone.value, alone.high) == (3, 3, 3)


def test_interquartile_mean_of_runs_agrees_with_that_of_single_episodes():
    scores = np.random.default_rng(0).normal(size=9)
    assert interquartile_mean_over_runs([scores]) == stratified_interquartile_mean([scores[:, None]])


def test_tasks_with_different_numbers_of_runs_count_equally():
    assert interquartile_mean_over_runs([np.ones(5), np.zeros(1)]).value == pytest.approx(0.5)
    twice = [np.array([0.0, 3.0, 0.0, 3.0]), np.array([8.0, 2.0])]
    assert interquartile_mean_over_runs(twice).value == pytest.approx(
        interquartile_mean_over_runs([np.array([0.0, 3.0]), np.array([8.0, 2.0])]).value
    )


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_seed_determines_the_interval(aggregate):
    assert aggregate(tables(), seed=3) == aggregate(tables(), seed=3)
    assert aggregate(tables(), seed=3) != aggregate(tables(), seed=4)


@pytest.mark.parametrize("runs", [5, 4], ids=["unequal", "equal"])
def test_several_intervals_at_once_equal_single_ones_to_the_last_bit(runs):
    rng = np.random.default_rng(0)
    scores = [rng.normal(size=(runs, 7)), rng.normal(size=(4, 3))]
    found = intervals_of(scores, [aggregate.__name__ for aggregate in AGGREGATES], seed=2)
    assert found == {aggregate.__name__: aggregate(scores, seed=2) for aggregate in AGGREGATES}


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (6, 1), (4, 5)])
def test_resamples_draw_agents_and_then_episodes_of_each(shape):
    table = np.random.default_rng(0).normal(size=shape)
    drawn = intervals.resample_stratum(table, 50, np.random.default_rng(1))
    rng = np.random.default_rng(1)
    agents = rng.integers(shape[0], size=(50, shape[0], 1))
    assert (drawn == table[agents, rng.integers(shape[1], size=(50, *shape))]).all()


def test_batches_do_not_change_the_shape_of_a_profile(monkeypatch):
    whole = performance_profile(tables(), [0.0, 1.0])
    monkeypatch.setattr(intervals, "_BATCH_NUMBERS", 100)
    parts = performance_profile(tables(), [0.0, 1.0])
    assert parts.low == pytest.approx(whole.low, abs=0.1)
    assert parts.value.tolist() == whole.value.tolist()


def test_bands_contain_their_value():
    found = Band.of_resamples(np.array([5.0, 0.0]), np.array([[1.0, -1.0], [2.0, 1.0]]))
    assert (found.high[0], found.low[1]) == (5, pytest.approx(-0.95))


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([], "at least one value"),
        ([[]], "at least one value"),
        ([1.0], "must be a table"),
        ([[1.0, np.nan]], "scores must be finite, got nan"),
        ([[[1.0, 2.0], [3.0]]], "same number of episodes; .* with the mean of each run"),
    ],
)
def test_invalid_scores_are_rejected(aggregate, scores, message):
    with pytest.raises(ValueError, match=message):
        aggregate(scores)


def test_other_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="same tasks, got 1 and 2 tasks"):
        probability_of_improvement([[1.0]], [[1.0], [2.0]])
    with pytest.raises(ValueError, match="gamma must be finite"):
        optimality_gap([[1.0]], np.inf)
    with pytest.raises(ValueError, match="thresholds must be finite"):
        performance_profile([[1.0]], [np.nan])
    with pytest.raises(ValueError, match="thresholds must be finite"):
        performance_profile([[1.0]], [])
