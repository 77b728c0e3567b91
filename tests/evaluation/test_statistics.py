"""Statistics, compared with slow definitions, and their invariants."""

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.evaluation.report import bootstrap_interval, interquartile_mean

values = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=40)
few = settings(max_examples=30, deadline=None)


@given(values)
def test_interquartile_mean_is_the_mean_of_the_middle(x):
    cut = len(x) // 4
    middle = sorted(x)[cut : len(x) - cut]
    assert interquartile_mean(np.array(x)) == pytest.approx(sum(middle) / len(middle), abs=1e-6)


@given(values, st.randoms())
def test_interquartile_mean_ignores_the_order(x, shuffler):
    shuffled = x.copy()
    shuffler.shuffle(shuffled)
    assert interquartile_mean(np.array(shuffled)) == pytest.approx(interquartile_mean(np.array(x)), abs=1e-6)


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
