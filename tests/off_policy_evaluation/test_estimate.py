"""Tests of `estimate_return`: estimates, intervals, fallbacks, warnings and bad input."""

import json
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf import DecisionTransformer, estimate_return
from rlxf.agents.decision_transformer import MaxReturn, decision_transformer
from rlxf.data import DatasetError, load_trajectories
from rlxf.off_policy_evaluation import FittedQConfig, estimate, fitted_q
from rlxf.utils.errors import NumericalError
from tests.datasets import ID, record_random
from tests.off_policy_evaluation.worlds import TabularAgent, TabularMDP, episodes_of, scaled, states_of

MDP = TabularMDP()
BEHAVIOR = np.full((4, 2), 0.5)
AGENT = TabularAgent([0, 1, 1, 0])


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Use small networks and few updates without a warning about them."""
    monkeypatch.setattr(estimate, "PROPAGATION", 0.0)
    monkeypatch.setattr(estimate, "estimate_behavior", lambda data, *_, folds: np.full(data.steps, 0.5))
    small = partial(FittedQConfig, batch_size=64, learning_rate=5e-3, width=32, target_rate=0.1)
    monkeypatch.setattr(estimate, "FittedQConfig", small)


def estimated(data, method="fqe", agent=AGENT, **options):
    """Estimate without reporting warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return estimate_return(
            agent, data, method, **({"discount": 0.8, "updates": 300, "members": 3} | options)
        )


@pytest.mark.parametrize("method", ["fqe", "dr", "wdr"])
def test_the_interval_contains_the_exact_value(method):
    data = MDP.record(BEHAVIOR, 200, 0)
    values = MDP.q(AGENT.policy_table, 0.8)[np.arange(4), AGENT.choices]
    exact = values[states_of(data)[data.offsets[:-1]]].mean()
    result = estimated(data, method)
    assert result.ci_low < exact < result.ci_high
    assert result.value == pytest.approx(np.mean(result.ci))
    assert result.method == method
    assert (result.effective_sample_size is None) == (method == "fqe")


def test_estimates_rank_policies_as_their_exact_values_do():
    data = MDP.record(BEHAVIOR, 200, 0)
    agents = [TabularAgent([n % 2, n // 2, 1 - n % 2, n // 2]) for n in range(4)]
    tables = [MDP.q(agent.policy_table, 0.8)[np.arange(4), agent.choices].mean() for agent in agents]
    values = [estimated(data, agent=agent, members=2).value for agent in agents]
    assert np.argsort(values).tolist() == np.argsort(tables).tolist()


def test_estimates_scale_with_the_rewards_and_repeat():
    data = MDP.record(BEHAVIOR, 30, 0)
    one, same, large = (estimated(each, "wdr", updates=30) for each in (data, data, scaled(data, 1e6)))
    assert one == same
    assert large.value / 1e6 == pytest.approx(one.value, rel=1e-2)
    assert large.logged_value / 1e6 == pytest.approx(one.logged_value, rel=1e-5)


def test_probabilities_and_q_functions_have_the_same_folds(monkeypatch):
    seen = {}
    fit, held_out = estimate.fit_q, "held_out"
    monkeypatch.setattr(estimate, "fit_q", lambda *args: seen.update({held_out: args[-1]}) or fit(*args))

    def probabilities(data, seed, device, folds):
        seen["folds"] = folds
        return np.full(data.steps, 0.5)

    monkeypatch.setattr(estimate, "estimate_behavior", probabilities)
    estimated(MDP.record(BEHAVIOR, 10, 0), "dr", updates=5)
    np.testing.assert_array_equal(seen["held_out"], seen["folds"] == np.arange(3)[:, None])


def test_an_unknown_behavior_policy_is_stated():
    data = MDP.record(BEHAVIOR, 30, 0)
    unknown = estimated(data, "dr", updates=5)
    assert any("behavior policy is unknown" in note for note in unknown.warnings)
    known = estimated(data, "dr", updates=5, behavior_probabilities=np.full(data.steps, 0.5))
    assert not any("unknown" in note for note in known.warnings)
    assert known.value == unknown.value
    with pytest.raises(
        ValueError, match=r"behavior_probabilities must be .* with shape \(\d+,\); got shape \(3,\)"
    ):
        estimated(data, "dr", behavior_probabilities=[1, 1, 1])


def test_few_effective_episodes_are_stated():
    data = MDP.record(np.tile([0.99, 0.01], (4, 1)), 20, 0)
    unlikely, known = TabularAgent([1, 1, 1, 1]), np.where(data.actions == 0, 0.99, 0.01)
    with pytest.warns(UserWarning, match=r"the effective sample size is .* episodes"):
        estimate_return(
            unlikely, data, "dr", discount=0.8, updates=5, members=2, behavior_probabilities=known
        )


def test_few_episodes_are_the_cause_of_a_small_effective_sample_size():
    data = MDP.record(AGENT.policy_table, 8, 0)
    result = estimated(data, "dr", updates=5, behavior_probabilities=np.ones(data.steps))
    assert result.effective_sample_size == 8
    assert "the effective sample size is 8.0 of 8 episodes: the data have few episodes; use more, or" in str(
        result.warnings
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rewards_that_are_not_finite_are_refused(value):
    data = MDP.record(BEHAVIOR, 10, 0)
    rewards = data.rewards.copy()
    rewards[5] = value
    with pytest.raises(ValueError, match=rf"the reward of step 5 of .* is {value}; correct the rewards"):
        estimated(replace(data, rewards=rewards))


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (2**32, ValueError), ("a", TypeError)])
def test_wrong_seeds_are_refused_before_the_agent_acts(seed, error, monkeypatch):
    monkeypatch.setattr(estimate, "replay", lambda *_: 1 / 0)
    with pytest.raises(error, match="seed must be"):
        estimated(MDP.record(BEHAVIOR, 10, 0), seed=seed)


def test_probabilities_without_effect_are_stated():
    data = MDP.record(BEHAVIOR, 10, 0)
    result = estimated(data, updates=5, behavior_probabilities=np.full(data.steps, 0.5))
    assert "behavior_probabilities has no effect on method='fqe'" in str(result.warnings)


@pytest.mark.parametrize("method", ["dr", "wdr"])
def test_corrections_use_values_of_other_episodes(method, monkeypatch):
    """The values that are applied to an episode come from a Q function that was trained without it."""
    seen = {}
    original = estimate.resampled_values

    def record(log, values, *rest):
        seen["values"] = values
        return original(log, values, *rest)

    monkeypatch.setattr(estimate, "resampled_values", record)
    data, first = MDP.record(BEHAVIOR, 9, 0), slice(0, 3)
    known = {"updates": 5, "behavior_probabilities": np.full(data.steps, 0.5)}
    estimated(data, method, **known)
    base = seen["values"].v[0, first]
    steps = np.arange(data.steps) < data.offsets[1]
    other = replace(data, rewards=np.where(steps, data.rewards + 7, data.rewards))
    estimated(other, method, **known)
    length = min(3, int(data.lengths[0]))
    np.testing.assert_array_equal(seen["values"].v[0, :length], base[:length])


def test_one_episode_is_estimated_without_correction():
    data = MDP.record(BEHAVIOR, 1, 3)
    result = estimated(data, "dr", updates=5, members=2)
    assert result.method == "fqe"
    assert any("on other episodes" in note for note in result.warnings)


def test_ratios_of_steps_without_correction_do_not_count():
    """The last step of a truncated episode is not corrected, so its ratio does not affect the sample size."""
    data = episodes_of(np.ones((8, 1)), np.tile([1, 0], 4), np.ones(8), [2] * 4, [False] * 4)
    agent = TabularAgent([1])
    result = estimated(data, "dr", agent, updates=5, members=2, behavior_probabilities=np.full(8, 0.5))
    assert result.effective_sample_size == pytest.approx(4)


def test_ratios_that_overflow_are_an_error():
    data = MDP.record(BEHAVIOR, 5, 0)
    likely = {"updates": 5, "behavior_probabilities": np.full(data.steps, 1e-300)}
    large = scaled(data, 1e5)
    agent = TabularAgent([0, 0, 0, 0])
    with pytest.raises(
        NumericalError, match=r"method='dr' overflows: logarithms of importance ratios reach .*'fqe'"
    ):
        estimated(large, "dr", agent, **likely)


def test_continuous_actions_use_the_direct_method(minari_root):
    record_random((5, 4, 6), action_space=spaces.Box(-1, 1, (2,), np.float32))
    data = load_trajectories(ID)
    core = decision_transformer(width=8, layers=1)
    agent = DecisionTransformer(data, context_length=4, core=core, device="cpu")
    result = estimated(data, "dr", agent, updates=5)
    assert result.method == "fqe"
    assert any("'dr' is replaced by 'fqe', the direct method" in note for note in result.warnings)
    assert result.target_return == pytest.approx(data.returns.max())
    other = estimated(data, "fqe", agent, updates=5, target_return=float(data.returns.min()))
    assert other.value != result.value


def test_a_single_episode_is_stated():
    data = MDP.record(BEHAVIOR, 1, 3)
    with pytest.warns(UserWarning, match="single episode"):
        result = estimate_return(AGENT, data, discount=0.8, updates=5, members=2)
    assert np.isfinite([result.value, *result.ci]).all()


def test_episodes_without_a_marked_end_are_stated():
    data = MDP.record(BEHAVIOR, 5, 0)
    unmarked = replace(data, terminated=np.zeros(5, bool), truncated=np.zeros(5, bool))
    note = "5 of 5 episodes end neither terminated nor truncated, so they count as truncated"
    with pytest.warns(UserWarning, match=note):
        estimate_return(AGENT, unmarked, discount=0.8, updates=5, members=2)
    cut = replace(unmarked, truncated=np.ones(5, bool))
    assert not [sentence for sentence in estimated(cut, updates=5).warnings if "end neither" in sentence]


def test_too_few_updates_are_stated(monkeypatch):
    monkeypatch.setattr(estimate, "PROPAGATION", 3.0)
    data = MDP.record(BEHAVIOR, 5, 0)
    with pytest.warns(UserWarning, match="5 updates propagate values over about .* use at least 3000"):
        estimate_return(AGENT, data, discount=0.99, updates=5, members=2)


def test_output_as_text_json_and_table():
    result = estimated(MDP.record(BEHAVIOR, 30, 0), "wdr", updates=5)
    assert str(result).startswith("estimated discounted return ")
    assert "95% interval" in str(result)
    restored = json.loads(result.to_json())
    assert (restored["method"], restored["discount"]) == ("wdr", 0.8)
    assert "effective sample size" in str(result.table())


def test_bad_input_is_rejected_before_training(monkeypatch):
    monkeypatch.setattr(estimate, "replay", None)
    data = MDP.record(BEHAVIOR, 30, 0, limit=3)
    with pytest.raises(ValueError, match="method must be one of fqe, dr, wdr, got 'is'"):
        estimated(data, "is")
    with pytest.raises(ValueError, match="all rewards of test/tabular-v0 are 0"):
        estimated(scaled(data, 0.0))
    with pytest.raises(ValueError, match=r"undiscounted return \(discount=1\) needs episodes that all end"):
        estimated(data, discount=1.0)
    with pytest.raises(ValueError, match="discount must be above 0"):
        estimated(data, discount=1.01)
    with pytest.raises(ValueError, match="target_return needs an agent that is conditioned on a return"):
        estimated(data, target_return=1.0)
    predicting = TabularAgent([0, 1, 1, 0])
    predicting.conditioning = MaxReturn()
    with pytest.raises(
        ValueError, match=r"got TabularAgent with conditioning=MaxReturn\(.*\), which predicts"
    ):
        estimated(data, target_return=1.0, agent=predicting)
    with pytest.raises(TypeError, match="agent must have predict"):
        estimated(data, agent=object())
    ones = episodes_of(np.ones((2, 1)), np.zeros(2, np.int64), np.ones(2), [1, 1], [False, False])
    with pytest.raises(ValueError, match="no step of test/tabular-v0 can be used"):
        estimated(ones)


def test_spaces_of_agent_and_data_must_match():
    class Other(TabularAgent):
        observation_space, action_space = spaces.Box(0, 1, (3,), np.float32), spaces.Discrete(2)

    with pytest.raises(DatasetError, match="the agent does not fit dataset"):
        estimated(MDP.record(BEHAVIOR, 3, 0), agent=Other([0, 0, 0, 0]))


def test_undiscounted_values_of_terminated_episodes():
    data = MDP.record(BEHAVIOR, 50, 0, limit=1000)
    assert np.isfinite(estimated(data, discount=1.0, updates=20).value)


def test_large_images_are_rejected():
    space = spaces.Box(0, 255, (3, 40, 40), np.uint8)
    images = np.zeros((3, 3, 40, 40), np.uint8)
    data = episodes_of(np.zeros((3, 1)), np.zeros(3, np.int64), np.ones(3), [3], [True])
    data = replace(
        data, observations=images, observation_space=space, observation_mean=None, observation_std=None
    )
    with pytest.raises(TypeError, match="needs vector observations, or images below 36 x 36"):
        fitted_q.fit_q(data, torch.ones(3, 1))
