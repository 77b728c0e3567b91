"""Tests of the estimated behavior policy: accuracy, small data, folds and bad input."""

from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.off_policy_evaluation.behavior import MIN_PROBABILITY, estimate_behavior
from tests.off_policy_evaluation.worlds import TabularMDP, episodes_of, states_of

MDP = TabularMDP()
POLICY = np.array([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5], [0.2, 0.8]])


def random_actions(episodes, length=4, share=0.5, seed=0):
    """Return episodes of two actions, the first with probability ``share``, that no observation predicts."""
    rng, steps = np.random.default_rng(seed), episodes * length
    actions = (rng.random(steps) >= share).astype(np.int64)
    return episodes_of(
        rng.normal(size=(steps, 4)), actions, np.ones(steps), [length] * episodes, [True] * episodes
    )


def test_probabilities_are_those_of_the_behavior_policy():
    data = MDP.record(POLICY, 400, 0)
    found, states = estimate_behavior(data, updates=200), states_of(data)
    assert np.abs(found - POLICY[states, data.actions]).mean() < 0.08
    assert np.array_equal(found, estimate_behavior(data, updates=200))


@pytest.mark.parametrize("episodes", [25, 50])
def test_actions_of_few_episodes_are_not_memorized(episodes):
    """A network without validation, or that scores its own training steps, gives about 0 and 1."""
    found = estimate_behavior(random_actions(episodes), updates=400)
    assert found.mean() == pytest.approx(0.5, abs=0.05)
    assert np.abs(found - 0.5).max() < 0.3


def test_an_episode_is_scored_by_a_network_that_was_trained_without_it():
    """The opposite actions of an episode have the opposite probability, so they are not in its network."""
    data, folds = MDP.record(POLICY, 12, 0), np.arange(12) % 3
    own = np.repeat(folds, data.lengths) == 1
    other = replace(data, actions=np.where(own, 1 - data.actions, data.actions))
    one, changed = (estimate_behavior(each, updates=50, folds=folds) for each in (data, other))
    np.testing.assert_allclose(changed[own], 1 - one[own], rtol=1e-5)
    assert not np.allclose(changed[~own], one[~own])


@pytest.mark.parametrize("updates", [0, 300])
def test_few_actions_without_a_pattern_have_their_frequencies(updates):
    """Without an update, and if no update has a smaller error, the estimate is the smoothed frequency."""
    data = random_actions(4, length=2, share=1.0)
    folds = np.array([0, 0, 1, 1])  # 4 steps to train on, none of them is left for the validation
    found = estimate_behavior(replace(data, action_space=spaces.Discrete(3)), updates=updates, folds=folds)
    np.testing.assert_allclose(found, 5 / 7, rtol=1e-6)


def test_probabilities_of_several_choices_are_products():
    data = random_actions(4, length=2, share=1.0)
    space, actions = spaces.MultiDiscrete([2, 3]), np.zeros((8, 2), np.int64)
    folds = np.array([7, 7, 2, 2])
    found = estimate_behavior(replace(data, action_space=space, actions=actions), updates=0, folds=folds)
    np.testing.assert_allclose(found, 5 / 6 * 5 / 7, rtol=1e-6)


def test_probabilities_have_a_lower_bound():
    data = random_actions(40, length=50, share=1.0)
    other = replace(data, action_space=spaces.Discrete(2), actions=(np.arange(2000) == 3).astype(np.int64))
    assert estimate_behavior(other, updates=0).min() == MIN_PROBABILITY


def test_episodes_in_one_fold_are_refused():
    message = "got 3 episodes in one fold; use at least two episodes in different folds"
    with pytest.raises(ValueError, match=message):
        estimate_behavior(random_actions(3), folds=np.ones(3, np.int64))
