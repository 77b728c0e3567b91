"""Tests of the statistics of rewards and actions, against loops over all steps."""

from collections import Counter

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.data import action_encoder, step_statistics
from rlxf.data.step_statistics import ActionStatistics, RewardStatistics, nearly_constant_features, pieces
from tests.data.reports import SPACES


@pytest.fixture(params=[8, 2**23], ids=["many pieces", "one piece"], autouse=True)
def _piece_bytes(request, monkeypatch):
    monkeypatch.setattr(step_statistics, "PIECE_BYTES", request.param)


def test_pieces_are_the_rows_in_order():
    rows = np.arange(35).reshape(7, 5)
    assert np.concatenate(list(pieces(rows))).tolist() == rows.tolist()
    assert all(np.shares_memory(piece, rows) for piece in pieces(rows))


@pytest.mark.parametrize(
    "rewards",
    [[0.0, 0, 0], [1.0, 1, 1], [-1.0, -1, -1, 0], [0.0, 0, 5, -2], [3.0, 1, 2, 3], [7.0]],
    ids=str,
)
def test_rewards_are_counted_as_in_a_loop(rewards):
    statistics = RewardStatistics.of(np.array(rewards, np.float32))
    assert (statistics.minimum, statistics.maximum) == (min(rewards), max(rewards))
    assert statistics.mean == pytest.approx(sum(rewards) / len(rewards))
    counts = Counter(rewards)
    candidates = {0.0, min(rewards), max(rewards), sorted(rewards)[len(rewards) // 2]}
    assert counts[statistics.common] == max(counts[each] for each in candidates)
    assert statistics.common_fraction == counts[statistics.common] / len(rewards)
    assert statistics.constant == (len(counts) == 1)


@pytest.mark.parametrize(("zeros", "nearly"), [(94, False), (95, True), (99, True), (100, False)])
def test_rewards_are_nearly_constant_if_nearly_all_are_equal(zeros, nearly):
    rewards = np.ones(100, np.float32)
    rewards[:zeros] = 0
    assert RewardStatistics.of(rewards).nearly_constant is nearly


def test_a_common_reward_between_the_extremes_is_found():
    """A penalty in each step, a goal and a trap."""
    statistics = RewardStatistics.of(np.array([-0.01] * 98 + [1, -1], np.float32))
    assert statistics.nearly_constant
    assert (statistics.common, statistics.common_fraction) == (pytest.approx(-0.01), 0.98)


def test_a_share_below_one_is_not_rounded_to_all_steps():
    rewards = np.zeros(10_000, np.float32)
    rewards[3] = 1
    assert str(RewardStatistics.of(rewards)).endswith("0 in 99.9% of the steps")


@pytest.mark.parametrize("name", SPACES)
def test_actions_are_counted_as_in_a_loop(name):
    space = SPACES[name]
    space.seed(0)
    values = np.stack([space.sample() for _ in range(9)])
    statistics = ActionStatistics.of(action_encoder(space)(values), space)
    columns = values.reshape(9, -1).T.astype(np.float64)
    np.testing.assert_allclose(statistics.minimum, columns.min(axis=1))
    np.testing.assert_allclose(statistics.maximum, columns.max(axis=1))
    if isinstance(space, spaces.Box):
        assert statistics.frequencies is None
        return
    for column, shares, start in zip(columns, statistics.frequencies, statistics.start, strict=True):
        counts = Counter(column)
        assert shares.tolist() == pytest.approx([counts[start + i] / 9 for i in range(len(shares))])


def test_constant_components_and_unused_values_are_found():
    space = SPACES["MultiDiscrete"]
    encoded = action_encoder(space)(np.array([[5, 0], [5, 2]]))
    statistics = ActionStatistics.of(encoded, space)
    assert statistics.constant == [0]
    assert statistics.unused == {0: [6], 1: [1]}


def test_components_are_narrow_below_a_twentieth_of_their_bounds():
    """Not constant ones, and not those that agents do not scale."""
    high = np.array([10, 9, 1000, np.inf, 3e38], np.float32)
    low = -np.array([10, 9, 1000, 5, 3e38], np.float32)
    actions = np.array([[0, 0, 3, 0, 0], [0.9, 0.95, 3, 0.1, 1]], np.float32)
    assert ActionStatistics.of(actions, spaces.Box(low, high)).narrow == [0]
    assert ActionStatistics.of(np.array([0, 1]), spaces.Discrete(1000)).narrow == []


def test_features_are_nearly_constant_if_they_vary_by_their_rounding():
    size = np.array([1e-30, 1, 1e9, 1, 0], np.float32)
    change = np.array([1e-30, 1e-7, 100, 1e-5, 0], np.float32)
    rows = np.stack([size, size + change])
    assert ((rows[0] != rows[1]) == [True, True, True, True, False]).all()
    assert nearly_constant_features(rows, np.ones(5, np.float32)) == [1, 2]
    assert nearly_constant_features(np.zeros((2, 1, 3, 3), np.uint8), np.ones((1, 3, 3), np.float32)) == []


def test_only_features_with_the_standard_deviation_of_constant_ones_are_read(monkeypatch):
    rows = np.array([[1, 1, 1]], np.float32) + np.array([[0], [1e-7]], np.float32)
    assert nearly_constant_features(rows, np.array([3, 1, 1e-7], np.float32)) == [1]
    monkeypatch.setattr(step_statistics, "pieces", None)
    assert nearly_constant_features(rows, np.array([3, 2, 1e-7], np.float32)) == []


def test_values_of_huge_spaces_are_not_counted():
    statistics = ActionStatistics.of(np.array([3, 10**9]), spaces.Discrete(2 * 10**9))
    assert statistics.frequencies is None
    assert statistics.unused == {}
    assert str(statistics) == "1 component, from 3 to 1e+09"


def test_frequencies_are_shown_with_the_values_of_the_space():
    space = SPACES["Discrete"]
    assert str(ActionStatistics.of(np.array([0, 0, 3, 1]), space)) == "-1: 50.0%, 0: 25.0%, 1: 0.0%, 2: 25.0%"
