"""Tests of fitted Q evaluation: exact values of a tabular MDP, ends of episodes, scale, seeds, divergence."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlxf.off_policy_evaluation import FittedQConfig, fit_q, fitted_q
from rlxf.off_policy_evaluation.fitted_q import (
    TransitionBatches,
    discounted_returns_to_go,
    resample_counts,
)
from rlxf.off_policy_evaluation.networks import StepFeatures
from rlxf.utils.errors import DatasetError, NumericalError
from tests.off_policy_evaluation.worlds import TabularMDP, episodes_of, scaled, states_of

MDP = TabularMDP()
BEHAVIOR = np.full((4, 2), 0.5)
POLICY = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.3, 0.7]])
FAST = FittedQConfig(
    discount=0.8, updates=400, members=2, batch_size=64, width=32, learning_rate=5e-3, target_rate=0.1
)


def policy_actions(data, policy=POLICY):
    return torch.from_numpy(policy[states_of(data)]).float()


def error(episodes, seed):
    """Root mean square error of Q over all states and actions, relative to the spread of Q."""
    data = MDP.record(BEHAVIOR, episodes, seed)
    values, exact = fit_q(data, policy_actions(data), FAST, seed=seed), MDP.q(POLICY, 0.8)
    expected = exact[states_of(data), data.actions]
    return np.sqrt(np.square(values.q.mean(axis=0) - expected).mean()) / exact.std()


@pytest.mark.thorough
def test_values_of_a_tabular_mdp_are_exact_with_much_data():
    few, many = error(6, 0), error(800, 0)
    assert many < 0.15
    assert many < few / 2


def test_v_is_the_expectation_of_q_under_the_policy():
    data = MDP.record(BEHAVIOR, 30, 0)
    values = fit_q(data, policy_actions(data), replace(FAST, updates=5))
    first = states_of(data) == 0
    chosen = first & (data.actions == 0)
    np.testing.assert_allclose(values.v[:, first][:, :1], values.q[:, chosen][:, :1], rtol=1e-6)


def test_values_follow_the_trained_networks_at_the_target_rate():
    data = MDP.record(BEHAVIOR, 30, 0)

    def q(updates, rate):
        return fit_q(data, policy_actions(data), replace(FAST, updates=updates, target_rate=rate)).q

    first = q(1, 1e-12)
    np.testing.assert_allclose(q(20, 1e-12), first, rtol=1e-5)
    slow, fast = (np.abs(q(20, rate) - first).mean() for rate in (0.01, 0.1))
    assert 0 < 2 * slow < fast


def test_rewards_of_other_data_are_validated():
    data = MDP.record(BEHAVIOR, 3, 0)
    rewards = data.rewards.copy()
    rewards[1] = np.nan
    with pytest.raises(DatasetError, match=r"the reward of step 1 .* is nan"):
        fit_q(replace(data, rewards=rewards), policy_actions(data), replace(FAST, updates=1))


@pytest.mark.parametrize(("terminated", "expected"), [(True, 1.0), (False, 10.0)])
def test_terminated_episodes_bootstrap_nothing_and_truncated_ones_go_on(terminated, expected):
    """All rewards are 1: the last step has the value 1 or, in an endless task, 1 / (1 - gamma)."""
    lengths = np.full(20, 5)
    last = np.tile(np.arange(5) == 4, 20) * terminated
    data = episodes_of(
        np.stack([last, ~last], axis=1), np.zeros(100, np.int64), np.ones(100), lengths, [terminated] * 20
    )
    config = replace(FAST, discount=0.9, updates=400, target_rate=0.2)
    values = fit_q(data, torch.ones(100, 1), config)
    assert values.q[:, data.offsets[1:] - 1].mean() == pytest.approx(expected, rel=0.05)


def test_the_last_step_of_a_truncated_episode_is_left_out():
    observations = np.arange(5.0)[:, None]
    data = episodes_of(observations, np.zeros(5, np.int64), np.ones(5), [2, 3], [True, False])
    assert data.complete_transitions.tolist() == [True, True, True, True, False]
    generator = torch.Generator().manual_seed(0)
    batches = TransitionBatches(data, torch.ones(5, 1), StepFeatures(data), FAST, generator)
    batch = batches.sample()
    assert batch.states.max() == 3
    terminal = batch.states[..., 0] == 1
    assert (batch.discount[terminal] == 0).all()
    assert (batch.discount[~terminal] > 0).all()
    following = batch.next_states - batch.states
    assert (following[~terminal] == 1).all()


def test_random_numbers_select_among_the_usable_steps_of_the_resampled_episodes():
    data = MDP.record(BEHAVIOR, 12, 0)
    arguments = policy_actions(data), StepFeatures(data), FAST
    batches = TransitionBatches(data, *arguments, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    counts = resample_counts(data.episodes, FAST.members, generator)
    steps = np.flatnonzero(data.complete_transitions)
    episode = np.repeat(np.arange(data.episodes), data.lengths)[steps]
    for _ in range(3):
        uniform = torch.rand(FAST.members, FAST.batch_size, generator=generator, dtype=torch.float64).numpy()
        usable = [np.repeat(steps, each[episode]) for each in counts]
        expected = [each[(row * len(each)).astype(int)] for each, row in zip(usable, uniform, strict=True)]
        assert batches._draw().tolist() == np.array(expected).tolist()


def test_discounted_returns_to_go_equal_a_loop():
    data = MDP.record(BEHAVIOR, 7, 0)
    expected = np.zeros(data.steps)
    for start, end in zip(data.offsets, data.offsets[1:], strict=False):
        following = 0.0
        for step in range(end - 1, start - 1, -1):
            following = expected[step] = data.rewards[step] + 0.9 * following
    np.testing.assert_allclose(discounted_returns_to_go(data, 0.9), expected, atol=1e-6)


@pytest.mark.parametrize("factor", [1e6, 1e-6])
def test_values_scale_with_the_rewards(factor):
    data, config = MDP.record(BEHAVIOR, 30, 0), replace(FAST, updates=50)
    base = fit_q(data, policy_actions(data), config)
    large = fit_q(scaled(data, factor), policy_actions(data), config)
    np.testing.assert_allclose(large.q / factor, base.q, rtol=1e-2, atol=1e-2 * base.q.std())


def test_equal_seeds_give_equal_bits():
    data, config = MDP.record(BEHAVIOR, 10, 0), replace(FAST, updates=5)
    state = torch.get_rng_state()
    one, other, different = (fit_q(data, policy_actions(data), config, seed=seed).v for seed in (3, 3, 4))
    assert np.array_equal(one, other)
    assert not np.array_equal(one, different)
    assert torch.equal(torch.get_rng_state(), state)


def test_many_actions_are_predicted_in_smaller_parts(monkeypatch):
    """Parts of the steps have the values of a single pass, and no pass has more outputs than allowed."""
    data, config, sizes = MDP.record(BEHAVIOR, 10, 0), replace(FAST, updates=2), []
    choices = torch.from_numpy(data.actions)
    base = fit_q(data, choices, config)
    features = StepFeatures.__call__
    record = lambda self, steps: sizes.append(len(steps)) or features(self, steps)  # noqa: E731
    monkeypatch.setattr(fitted_q, "LARGEST_OUTPUT", 12)
    monkeypatch.setattr(StepFeatures, "__call__", record)
    np.testing.assert_allclose(fit_q(data, choices, config).v, base.v, rtol=1e-5)
    assert sizes[-2] * FAST.members * 2 == 12


def test_choices_have_the_values_of_their_one_hot_vectors():
    data, config = MDP.record(BEHAVIOR, 10, 0), replace(FAST, updates=5)
    choices = torch.from_numpy(1 - data.actions)
    one, other = (fit_q(data, actions, config).v for actions in (choices, torch.eye(2)[choices]))
    np.testing.assert_array_equal(one, other)


def test_divergence_is_reported_with_advice(monkeypatch):
    monkeypatch.setattr(fitted_q, "DIVERGENCE_FACTOR", 1e-3)
    data = MDP.record(BEHAVIOR, 10, 0)
    with pytest.raises(NumericalError, match=r"diverge: they reach .* lower the discount"):
        fit_q(data, policy_actions(data), replace(FAST, updates=5))


def test_nan_is_reported_with_the_update():
    data = MDP.record(BEHAVIOR, 10, 0)
    with pytest.raises(NumericalError, match="fitted Q evaluation, update 0: the loss is nan"):
        fit_q(data, policy_actions(data) * np.nan, replace(FAST, updates=5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"discount": 0.0}, "discount must be above 0 and at most 1"),
        ({"discount": 1.5}, "discount must be above 0 and at most 1"),
        ({"updates": 0}, "updates must be at least 1"),
        ({"members": 1}, "members must be at least 2"),
        ({"learning_rate": np.inf}, "learning_rate must be finite"),
    ],
)
def test_settings_out_of_range_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        FittedQConfig(**change)


def test_values_do_not_depend_on_held_out_episodes():
    """A member without an episode has the same values, whatever its rewards, observations and actions are."""
    data = MDP.record(BEHAVIOR, 12, 0)
    folds = fitted_q.folds_of_episodes(data.episodes, 3, 0)
    assert np.bincount(folds).tolist() == [4, 4, 4]
    held_out, own = folds == np.arange(3)[:, None], folds[np.repeat(np.arange(12), data.lengths)]
    base = fit_q(data, policy_actions(data), replace(FAST, updates=20, members=3), held_out=held_out)
    rewards = np.where(own == 1, data.rewards + 0.5, data.rewards)
    actions = np.where(own == 1, 1 - data.actions, data.actions)
    other = replace(data, rewards=rewards, actions=actions)
    changed = fit_q(other, policy_actions(data), replace(FAST, updates=20, members=3), held_out=held_out)
    np.testing.assert_array_equal(changed.v[1], base.v[1])
    assert (changed.v[0] != base.v[0]).any()
    assert (changed.v[2] != base.v[2]).any()
    chosen = base.of_members(own)
    for step in range(data.steps):
        assert chosen.q[0, step] == base.q[own[step], step]
        assert chosen.v[0, step] == base.v[own[step], step]


def test_a_member_without_other_usable_steps_is_trained_on_all():
    data = episodes_of(np.ones((3, 1)), np.array([0, 1, 0]), np.ones(3), [1, 2], [False, True])
    config = FittedQConfig(updates=3, members=2, batch_size=4, width=4)
    values = fit_q(data, torch.eye(2)[[0, 1, 0]], config, held_out=np.eye(2, dtype=np.bool_))
    assert np.isfinite(values.v).all()


@pytest.mark.parametrize("name", ["updates", "members", "batch_size", "width", "discount", "target_rate"])
@pytest.mark.parametrize("value", ["x", None, [3]])
def test_settings_of_wrong_type_are_rejected(name, value):
    with pytest.raises(TypeError, match=f"{name} must be"):
        FittedQConfig(**{name: value})
