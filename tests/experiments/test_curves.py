"""Tests of curves: interpolation, bands over seeds, areas."""

import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.experiments import curves
from rlxf.experiments.curves import (
    Curve,
    band,
    common_grid,
    common_steps,
    hold_last_values,
    interpolate,
)

few = settings(max_examples=40, deadline=None)
points = st.dictionaries(st.integers(0, 50).map(float), st.integers(-9, 9).map(float), min_size=1, max_size=8)


def curve(steps, values):
    return Curve.of_points(steps, values)


@few
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-9, 9)), min_size=1))
def test_points_are_sorted_and_the_last_of_a_step_counts(pairs):
    found = curve(*zip(*pairs, strict=True))
    expected = dict(sorted(dict(pairs).items()))
    assert dict(zip(found.steps.tolist(), found.values.tolist(), strict=True)) == expected


@few
@given(points, st.lists(st.floats(-10, 60), min_size=1, max_size=9))
def test_interpolation_joins_points_and_does_not_extrapolate(values, grid):
    found = interpolate([curve(list(values), list(values.values()))], grid)[0]
    steps = sorted(values)
    for x, y in zip(grid, found, strict=True):
        if not steps[0] <= x <= steps[-1]:
            assert np.isnan(y)
            continue
        left = max(step for step in steps if step <= x)
        right = min(step for step in steps if step >= x)
        part = 0 if left == right else (x - left) / (right - left)
        assert y == pytest.approx(values[left] + part * (values[right] - values[left]), abs=1e-9)


def test_trainings_that_ended_early_keep_their_last_value():
    solved, other, longest = curve([1, 2], [0, 9]), curve([1, 3], [4, 5]), curve([1, 6], [0, 0])
    held = hold_last_values([solved, other, longest], [True, False, True])
    assert (held[0].steps.tolist(), held[0].values.tolist()) == ([1, 2, 6], [0, 9, 9])
    assert held[1] is other
    assert held[2] is longest
    assert hold_last_values([], []) == []
    assert held[0].hold_until(5) is held[0]


def test_a_grid_has_the_steps_that_all_curves_cover():
    both = [curve([0, 10, 30], [1, 2, 3]), curve([5, 10, 20], [1, 2, 3])]
    assert common_steps(both) == (5, 20)
    assert common_grid(both).tolist() == [5, 10, 20]
    assert common_grid([curve([1, 2], [0, 0]), curve([3, 4], [0, 0])]).size == 0
    long = [curve(np.arange(1000), np.zeros(1000))]
    assert len(common_grid(long)) == curves.MAX_GRID
    assert common_grid(long)[[0, -1]].tolist() == [0, 999]


def test_band_equals_a_slow_bootstrap():
    table = np.random.default_rng(0).normal(size=(6, 40)) + np.arange(40)
    found, rng = band(table), random.Random(0)
    for point in (0, 35):
        column = table[:, point].tolist()
        means = sorted(statistics.mean(rng.choices(column, k=6)) for _ in range(8000))
        width = means[-200] - means[200]
        assert found.value[point] == pytest.approx(statistics.mean(column))
        assert (found.low[point], found.high[point]) == pytest.approx(
            (means[200], means[-200]), abs=0.1 * width
        )
    assert (found.low <= found.value).all()
    assert (found.value <= found.high).all()


def test_band_is_deterministic_and_does_not_depend_on_batches(monkeypatch):
    table = np.random.default_rng(0).normal(size=(9, 50))
    first = band(table)
    monkeypatch.setattr(curves, "_BATCH_POINTS", 7)
    assert band(table).low == pytest.approx(first.low)
    assert band(table, seed=1).low.tolist() != first.low.tolist()


def test_band_of_one_seed_has_no_width_and_gaps_stay_gaps():
    alone = band([[1.0, 2.0]])
    assert alone.low.tolist() == alone.high.tolist() == [1, 2]
    found = band([[1.0, np.nan, 3.0], [2.0, 2.0, 5.0]])
    assert np.isnan([found.value[1], found.low[1], found.high[1]]).all()
    assert found.value[[0, 2]].tolist() == [1.5, 4]
    assert band(np.empty((2, 0))).low.shape == (0,)


@pytest.mark.parametrize("table", [[], [1.0, 2.0], np.empty((0, 3))])
def test_other_tables_have_no_band(table):
    with pytest.raises(ValueError, match="a band needs a table"):
        band(table)


def test_mean_over_steps_is_the_area_of_trapezoids():
    found = curve([0, 10, 20], [0, 10, 10])
    assert found.mean_over(0, 20) == pytest.approx((50 + 100) / 20)
    assert found.mean_over(5, 15) == pytest.approx((37.5 + 50) / 10)
    assert found.mean_over(5, 5) is None
    assert found.mean_over(0, 21) is None
    assert found.mean_over(-1, 20) is None


@few
@given(points)
def test_mean_over_steps_is_between_the_values(values):
    found = curve(list(values), list(values.values()))
    mean = found.mean_over(found.steps[0], found.steps[-1])
    assert (mean is None) == (len(values) == 1)
    assert mean is None or min(values.values()) - 1e-9 <= mean <= max(values.values()) + 1e-9


def test_last_values_and_smoothing():
    found = curve([1, 2, 3], [3, 6, 9])
    assert [found.last(), found.last(2), found.last(9)] == [9, 7.5, 6]
    assert found.smooth(2).values.tolist() == [3, 4.5, 7.5]
    assert found.smooth(1).values.tolist() == [3, 6, 9]


@pytest.mark.parametrize(
    ("steps", "values", "message"),
    [
        ([], [], "at least one"),
        ([1, 2], [1], "one value for each step"),
        ([[1]], [[1]], "one value for each step"),
        ([1, np.nan], [1, 2], "must be finite"),
        ([1, 2], [1, np.inf], "must be finite"),
    ],
)
def test_invalid_points_are_rejected(steps, values, message):
    with pytest.raises(ValueError, match=message):
        Curve.of_points(steps, values)


def test_steps_of_a_curve_increase():
    with pytest.raises(ValueError, match="must increase"):
        Curve(np.array([2.0, 1.0]), np.zeros(2))
