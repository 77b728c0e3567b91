"""Diagnostics warn once of divergence, and not of healthy training."""

import math
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecMonitor

from rlxf.agents.gtrxl.diagnostics import (
    EntropyCollapseCheck,
    ReturnScaleCheck,
    ValueLossCheck,
    collapse_threshold,
)
from rlxf.training import CheckpointFolder
from tests.agents.gtrxl.worlds import rollouts, scripts, shifted, small_agent


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Discrete(4), 0.01 * math.log(4)),
        (spaces.MultiDiscrete([2, 3]), 0.01 * math.log(6)),
        (spaces.MultiBinary(3), 0.03 * math.log(2)),
        (spaces.Box(-2.0, 2.0, (2,)), 2 * torch.distributions.Normal(0.0, 0.02).entropy().item()),
        (spaces.Box(-np.inf, np.inf, (1,)), torch.distributions.Normal(0.0, 0.01).entropy().item()),
        (spaces.Discrete(1), 0.0),
    ],
    ids=str,
)
def test_collapse_threshold_of_each_space(space, expected):
    assert collapse_threshold(space) == pytest.approx(expected, abs=1e-5)


def warned(look, updates):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for update in updates:
            look(*update)
    return [str(each.message) for each in caught]


def test_entropy_collapse_warns_once():
    collapsing = [(1.3, -5.0), (0.5, -5.0), (0.001, -6.0), (0.0005, -6.0)]
    (message,) = warned(EntropyCollapseCheck(spaces.Discrete(4)).check, collapsing)
    assert "entropy is 0.001 nats, and the mean return -6 is no better than the initial -5" in message


@pytest.mark.parametrize(
    "updates",
    [
        [(1.3, -5.0), (0.5, -1.0), (0.0, 1.0)],  # solved
        [(1.3, -5.0), (1.2, -6.0), (0.2, -6.0)],  # still explores
        [(0.0, 3.0)],  # no earlier return to compare with
    ],
)
def test_no_warning_without_entropy_collapse(updates):
    assert warned(EntropyCollapseCheck(spaces.Discrete(4)).check, updates) == []


def test_exploding_value_loss_warns_once():
    (message,) = warned(ValueLossCheck().check, [*[(1.0, 2.0)] * 10, (400.0, 2.0), (4000.0, 2.0)])
    assert "the value loss explodes: 400 is 200 times that of a constant prediction" in message


@pytest.mark.parametrize(
    "updates",
    [
        [(400.0, 1e-4), *[(1.0, 1.0)] * 20],  # fresh values, before the first reward
        [*[(1e-9, 1e-4)] * 200, (0.5, 0.5), (0.4, 0.5)],  # the first reward after a long time without
        [*[(0.5, 1.0)] * 50, *[(1e-4, 1.0)] * 50, (0.5, 1.0)],  # solved, then a single failure
        [(10.0**n, 10.0**n) for n in range(12)],  # returns and values grow alike
    ],
)
def test_no_warning_without_exploding_value_loss(updates):
    assert warned(ValueLossCheck().check, updates) == []


def test_rewards_that_an_outlier_hides_warn_once():
    updates = [(1e6, 1.0, 1e6, 1e5), *[(500.0, 1.0, 1e6, 1e5)] * 60]
    (message,) = warned(ReturnScaleCheck().check, updates)
    assert "rewards are tiny in comparison with an earlier return of 1e+06: their mean size is 1" in message


@pytest.mark.parametrize(
    "updates",
    [
        [(1e6, 1.0, 1e6, 1e5), *[(500.0, 1.0, 1e6, 1e5)] * 19],  # too early to say
        [(1.0, 0.0, 1.0, 0.1), *[(1e-4, 0.0, 1.0, 0.1)] * 60],  # a sparse reward, found once
        [(1.0, math.nan, 1.0, 0.1), *[(1e-4, math.nan, 1.0, 0.1)] * 60],  # each step ends an episode
        [(100.0, 1e-2, 100.0, 10.0), *[(1.0, 1e-2, 100.0, 10.0)] * 60],  # a penalty in each step, a rare goal
        [(500.0, 1.0, 1e6, 1e5), (1e6, 1.0, 1e6, 1e5)] * 30,  # large returns from time to time
        [(2e4, 1.0, 2e4, 1e4)] * 60,  # long episodes without discount
        [(110.0, 1e-3, 110.0, 3.5), *[(1.0, 1e-3, 110.0, 3.5)] * 60],  # an outlier that was bounded
    ],
)
def test_no_warning_about_rewards_of_a_common_scale(updates):
    assert warned(ReturnScaleCheck().check, updates) == []


def test_an_agent_that_had_a_return_of_a_million_warns():
    agent = small_agent(scripts(shifted(3)), loud=False, learning_rate=1e-6)
    agent.policy.value_net.largest.fill_(1e6)
    agent.policy.value_net.variance.fill_(1e10)
    agent.policy.value_net.rollouts.fill_(100)
    with pytest.warns(UserWarning, match=r"tiny in comparison with an earlier return of 1e\+06"):
        for _ in rollouts(agent, 21):
            pass


def test_agent_with_corrupted_policy_and_values_warns():
    agent = small_agent(VecMonitor(scripts(shifted(3))), learning_rate=1e-6, ent_coef=0.0)
    exploring, exploding = "the policy has stopped exploring", "the value loss explodes"
    with pytest.warns(UserWarning, match=exploring), pytest.warns(UserWarning, match=exploding):
        train_and_corrupt(agent)


@pytest.mark.thorough
def test_a_continued_training_is_compared_with_its_first_episodes(tmp_path):
    agent = small_agent(VecMonitor(scripts(shifted(3))))
    for _ in rollouts(agent, 12):
        pass
    first = agent._diagnostics.entropy.first_return
    assert first is not None
    agent._diagnostics.entropy.first_return = first - 7
    CheckpointFolder(tmp_path).write(1, agent.snapshot())
    other = small_agent(VecMonitor(scripts(shifted(3)))).load_training_state(tmp_path)
    assert other._diagnostics.entropy.first_return == first - 7
    other.learn(64, reset_num_timesteps=False)
    assert other._diagnostics.entropy.first_return == first - 7
    other.learn(64)
    assert other._diagnostics.entropy.first_return != first - 7


def train_and_corrupt(agent):
    for _ in rollouts(agent, 12):
        pass
    corrupt(agent)
    agent.train()


@torch.no_grad()
def corrupt(agent):
    agent._diagnostics.entropy.first_return = math.inf
    agent.policy.action_net.weight.zero_()
    agent.policy.action_net.bias.copy_(torch.tensor([0.0, 0.0, 100.0]))
    agent.policy.value_net.bias.add_(1e3)
