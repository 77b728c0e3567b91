"""Interquartile means, bootstrap intervals and rank correlations, compared with slow definitions."""

import random
import tracemalloc

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.evaluation import intervals
from rlxf.evaluation.intervals import (
    Interval,
    bootstrap_interval,
    interquartile_mean,
    rank_correlation,
    rank_correlation_interval,
    stratified_interquartile_mean,
)

values = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=40)
few = settings(max_examples=30, deadline=None)


@few
@given(values)
def test_interquartile_mean_is_the_mean_of_the_middle(x):
    cut = len(x) // 4
    middle = sorted(x)[cut : len(x) - cut]
    assert interquartile_mean(np.array(x)) == pytest.approx(sum(middle) / len(middle), abs=1e-6)


@few
@given(values, st.randoms())
def test_interquartile_mean_ignores_the_order(x, shuffler):
    shuffled = x.copy()
    shuffler.shuffle(shuffled)
    assert interquartile_mean(np.array(shuffled)) == pytest.approx(interquartile_mean(np.array(x)), abs=1e-6)


@few
@given(st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=4, max_size=40))
def test_interquartile_mean_ignores_one_broken_episode(x):
    broken = np.array(x)
    broken[np.argmax(broken)] = 1e30
    assert interquartile_mean(broken) == pytest.approx(interquartile_mean(np.array(x)), abs=1e-6)


@few
@given(values)
def test_interval_contains_the_mean_and_is_within_the_values(x):
    low, high = bootstrap_interval(np.array(x))
    assert low <= np.mean(x) <= high
    assert min(x) - 1e-6 <= low
    assert high <= max(x) + 1e-6


@few
@given(st.lists(st.integers(-100, 100), min_size=2, max_size=20), st.integers(-50, 50), st.integers(1, 50))
def test_interval_is_equivariant_to_shift_and_scale(x, shift, scale):
    moved = bootstrap_interval(shift + scale * np.array(x, dtype=float))
    expected = [shift + scale * bound for bound in bootstrap_interval(np.array(x, dtype=float))]
    assert moved == pytest.approx(expected)


@few
@given(st.floats(-1e9, 1e9, allow_subnormal=False), st.integers(1, 50))
def test_interval_of_equal_values_has_width_zero(value, count):
    low, high = bootstrap_interval(np.full(count, value))
    assert low == high == pytest.approx(value)


def test_interval_equals_a_naive_bootstrap():
    x = np.random.default_rng(0).exponential(size=30)
    rng = random.Random(0)
    means = sorted(sum(rng.choices(x.tolist(), k=30)) / 30 for _ in range(20_000))
    slow = means[500], means[-500]
    error = np.std(x) / np.sqrt(30)
    assert bootstrap_interval(x) == pytest.approx(slow, abs=0.1 * error)


def test_interval_covers_the_true_mean_about_95_times_in_100():
    generator = np.random.default_rng(0)
    intervals = [bootstrap_interval(generator.normal(7.0, 2.0, size=40), seed=i) for i in range(100)]
    covered = sum(low <= 7.0 <= high for low, high in intervals)
    assert 88 <= covered <= 99


def test_seed_determines_the_interval():
    x = np.random.default_rng(0).normal(size=25)
    assert bootstrap_interval(x, seed=3) == bootstrap_interval(x, seed=3)
    assert bootstrap_interval(x, seed=3) != bootstrap_interval(x, seed=4)


def test_many_values_need_little_memory():
    x = np.random.default_rng(0).normal(size=20_000)
    tracemalloc.start()
    low, high = bootstrap_interval(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert high - low == pytest.approx(2 * 1.96 / np.sqrt(20_000), rel=0.1)
    assert peak < 100 * 2**20  # all samples at once would be 1.6 GB


# Scores of several seeds and episodes


def slow_interquartile_mean(scores):
    cut = len(scores) // 4
    middle = sorted(scores)[cut : len(scores) - cut]
    return sum(middle) / len(middle)


def slow_interval(strata, resamples, rng):
    """Resample seeds, then episodes of each drawn seed, stratum by stratum, in plain loops."""
    means = []
    for _ in range(resamples):
        drawn = []
        for table in strata:
            for row in rng.choices(table, k=len(table)):
                drawn += rng.choices(row, k=len(row))
        means.append(slow_interquartile_mean(drawn))
    means.sort()
    return means[round(0.025 * resamples)], means[-round(0.025 * resamples)]


def tables(seed=0):
    """Return scores of two strata: 4 seeds of 6 episodes, and 3 seeds of 5."""
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(4, 1)) + rng.exponential(size=(4, 6)),
        10 + 3 * rng.normal(size=(3, 1)) + rng.normal(size=(3, 5)),
    ]


@pytest.mark.parametrize(
    "strata", [tables(), [np.arange(8.0)[None].repeat(3, axis=0)]], ids=["two strata", "equal seeds"]
)
def test_stratified_interval_equals_a_slow_loop(strata):
    found = stratified_interquartile_mean(strata)
    slow = slow_interval([table.tolist() for table in strata], 4000, random.Random(1))
    width = found.high - found.low
    assert found.value == pytest.approx(slow_interquartile_mean(np.concatenate([*map(np.ravel, strata)])))
    assert (found.low, found.high) == pytest.approx(slow, abs=0.06 * width)


def test_stratified_interval_of_one_seed_is_the_bootstrap_over_its_episodes():
    episodes = np.random.default_rng(0).gamma(2.0, size=60)
    found = stratified_interquartile_mean([episodes[None]])
    expected = scipy.stats.bootstrap(
        (episodes,), lambda x, axis: scipy.stats.trim_mean(x, 0.25, axis=axis), method="percentile", rng=3
    ).confidence_interval
    width = expected.high - expected.low
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.06 * width)


def test_differences_between_seeds_widen_the_interval_and_those_between_strata_do_not():
    rng = np.random.default_rng(0)
    same = rng.normal(size=(5, 50))

    def width(strata):
        found = stratified_interquartile_mean(strata)
        return found.high - found.low

    assert width([same + 5 * np.arange(5)[:, None]]) > 5 * width([same])
    far_apart = np.quantile(same, 0.5) + 0.01 * (same - np.quantile(same, 0.5))
    assert width([far_apart, far_apart + 100]) < width([same])


@pytest.mark.parametrize(("shift", "scale"), [(-5, 1), (3, 4)])
def test_stratified_interval_is_equivariant_to_shift_and_scale(shift, scale):
    before = stratified_interquartile_mean(tables())
    after = stratified_interquartile_mean([shift + scale * table for table in tables()])
    expected = [shift + scale * each for each in (before.value, before.low, before.high)]
    assert [after.value, after.low, after.high] == pytest.approx(expected)


def test_stratified_interval_covers_the_true_value(monkeypatch):
    """Scores of 8 seeds with deviation 1 and 20 episodes with deviation 1; the distribution is symmetric."""
    monkeypatch.setattr(intervals, "RESAMPLES", 999)
    rng, covered = np.random.default_rng(0), 0
    for _ in range(60):
        found = stratified_interquartile_mean([rng.normal(size=(8, 1)) + rng.normal(size=(8, 20))])
        covered += found.low <= 0 <= found.high
    assert 47 <= covered <= 60  # percentile intervals of 8 seeds are too narrow by about a tenth


def test_stratified_interval_does_not_depend_on_batches(monkeypatch):
    found = stratified_interquartile_mean(tables())
    monkeypatch.setattr(intervals, "_BATCH_NUMBERS", 1000)
    other = stratified_interquartile_mean(tables())
    assert found.value == other.value
    assert (found.low, found.high) == pytest.approx((other.low, other.high), abs=0.1)
    assert stratified_interquartile_mean(tables(), seed=1) != other


@pytest.mark.parametrize(
    ("strata", "message"),
    [
        ([], "at least one value"),
        ([np.ones(3)], r"table \(seeds, episodes\) .* got shapes \[\(3,\)\]"),
        ([np.ones((2, 3)), np.ones((2, 0))], r"\(2, 0\)"),
        ([np.array([[1.0, np.nan]])], "scores must be finite, got nan"),
        ([np.array([[1.0, -np.inf]])], "scores must be finite, got -inf"),
        ([[[1.0, 2.0], [3.0]]], "same number of episodes; .* with the mean of each run"),
    ],
)
def test_invalid_scores_are_rejected(strata, message):
    with pytest.raises(ValueError, match=message):
        stratified_interquartile_mean(strata)


def test_intervals_contain_their_value_and_format_all_numbers():
    assert Interval.of_resamples(5.0, np.array([1.0, 2.0])).high == 5
    assert Interval.of_resamples(0.0, np.array([1.0, 2.0])).low == 0
    assert f"{Interval(1.234, -0.5, 2):.1f}" == "1.2 (-0.5 to 2.0)"


# Rank correlations


def slow_correlation(x, y):
    """Spearman's correlation by counting, with mean ranks for ties."""

    def ranks(values):
        return [sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values]

    return np.corrcoef(ranks(x), ranks(y))[0, 1]


@few
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=12))
def test_rank_correlation_equals_its_definition(pairs):
    x, y = zip(*pairs, strict=True)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert rank_correlation(x, y) is None
    else:
        assert rank_correlation(x, y) == pytest.approx(slow_correlation(x, y))


def test_interval_of_a_rank_correlation_equals_a_slow_loop():
    rng, shuffler = np.random.default_rng(0), random.Random(0)
    x = rng.normal(size=12).round(1)
    y = x + rng.normal(size=12)
    found, slow = rank_correlation_interval([(x, y)]), []
    for _ in range(3000):
        drawn = shuffler.choices([*zip(x, y, strict=True)], k=12)
        slow.append(slow_correlation(*zip(*drawn, strict=True)))
    assert found.value == rank_correlation(x, y)
    assert (found.low, found.high) == pytest.approx(np.quantile(slow, (0.025, 0.975)), abs=0.05)


def test_several_groups_have_a_mean_correlation_with_a_narrower_interval():
    rng = np.random.default_rng(0)
    groups = [(x, x + rng.normal(size=15)) for x in rng.normal(size=(4, 15))]
    found, single = rank_correlation_interval(groups), rank_correlation_interval(groups[:1])
    assert found.value == pytest.approx(np.mean([rank_correlation(*group) for group in groups]))
    assert found.high - found.low < single.high - single.low


def test_undefined_correlations_are_left_out():
    """Of three pairs, a resample may consist of one pair only; its correlation is undefined."""
    defined = ([1, 2, 3], [1, 3, 2])
    found = rank_correlation_interval([defined])
    assert -1 <= found.low <= found.value <= found.high <= 1
    assert rank_correlation_interval([defined, ([1, 1, 1], [1, 2, 3])]) == found
    assert rank_correlation_interval([([1, 1, 1], [1, 2, 3])]) is None
    perfect = rank_correlation_interval([([1, 2, 3], [1, 2, 3]), ([1, 2, 3], [4, 5, 6])])
    assert (perfect.low, perfect.value, perfect.high) == pytest.approx((1, 1, 1))
    assert rank_correlation_interval([([1, 2], [1, 2])]) is None
