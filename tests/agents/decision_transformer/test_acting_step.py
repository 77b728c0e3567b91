"""The acting step of a context window as a function of tensors chooses the actions of `predict`."""

import numpy as np
import pytest
import torch

from rlxf.agents.decision_transformer.conditioning import (
    ElasticHistory,
    HighestValueReturn,
    MaxReturn,
    SampledReturn,
    TargetReturn,
)
from rlxf.agents.offline.objectives import QRegularized
from rlxf.attention import GatedDeltaNet, TransformerSpec
from rlxf.envs.return_to_go import encoded_observation_space
from rlxf.export.formats import trace_step
from rlxf.export.onnx_player import Player
from rlxf.utils.warnings import silenced
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    NESTED,
    OBSERVATIONS,
    SIZES,
    small_agent,
    some_trajectories,
)

ENVS = 2


class Episodes:
    """Random observations of environments with random ends, as `ReturnToGo` shows them for a target."""

    def __init__(self, agent):
        info, self.target = agent.dataset_info, agent.conditioning.needs_target
        space = info.observation_space
        self.space = encoded_observation_space(space) if self.target else space
        self.space.seed(0)
        self.rng = np.random.default_rng(0)
        actions = info.action_space
        start = np.zeros((ENVS, *(actions.shape or ())), actions.dtype) + getattr(actions, "start", 0)
        self.initial = self.previous = start.astype(actions.dtype)
        self.time = np.zeros(ENVS, np.int64)

    def next(self, number):
        """Return the next observations, and which are the first of an episode."""
        start = (self.rng.random(ENVS) < 0.15) | (number == 0)
        self.time = np.where(start, 0, self.time + 1)
        rows = start.reshape(-1, *[1] * (self.initial.ndim - 1))
        self.previous = np.where(rows, self.initial, self.previous)
        values = [self.space.sample() for _ in range(ENVS)]
        if isinstance(values[0], dict):
            return {key: np.stack([value[key] for value in values]) for key in values[0]}, start
        return (self._conditioned(np.stack(values)) if self.target else np.stack(values)), start

    def _conditioned(self, observations):
        returns = self.rng.normal(size=(ENVS, 1)).astype(np.float32)
        return {
            "observation": observations,
            "return_to_go": returns,
            "previous_action": self.previous,
            "time_step": self.time[:, None],
        }


def named(observations):
    if not isinstance(observations, dict):
        return {"observation": torch.as_tensor(observations)}
    return {f"observation.{key}": torch.as_tensor(value) for key, value in observations.items()}


@torch.no_grad()
def largest_difference(agent, function, step, steps=30):
    """Return the largest difference between actions of `predict` and of the functional step."""
    episodes, state, tensors, worst, seen = Episodes(agent), None, step.state, 0.0, []
    for number in range(steps):
        observation, start = episodes.next(number)
        expected, state = agent.predict(observation, state, start)
        actions, tensors = function(named(observation), torch.as_tensor(start), tensors)
        assert actions.numpy().dtype == expected.dtype
        assert actions.shape == expected.shape
        worst = max(worst, float(np.abs(actions.numpy() - expected).max()))
        episodes.previous = expected
        seen.append(expected)
    assert len(np.unique(np.concatenate(seen), axis=0)) > 1, "all actions are equal"
    return worst


def step_of(agent):
    return agent.policy.acting_step(agent.dataset_info, ENVS).eval()


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("core", ["published", "learned positions", "GTrXL", "Mamba-2 below attention"])
def test_exported_step_equals_predict(core):
    agent = small_agent(core=CORES[core])
    step = step_of(agent)
    with silenced():
        program = trace_step(step, vars(agent.policy.transformer.spec))
    assert largest_difference(agent, program.module(), step) < 1e-5


@pytest.mark.parametrize("actions", ACTIONS)
def test_step_equals_predict_for_all_actions(actions):
    agent = small_agent(some_trajectories(action_space=ACTIONS[actions]))
    assert largest_difference(agent, step_of(agent), step_of(agent)) < 1e-5


@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_step_equals_predict_for_all_observations(observations):
    agent = small_agent(some_trajectories(OBSERVATIONS[observations]))
    assert largest_difference(agent, step_of(agent), step_of(agent)) < 1e-5


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "conditioning", [MaxReturn(), SampledReturn(bins=7), ElasticHistory(), HighestValueReturn()]
)
def test_exported_step_predicts_returns(conditioning):
    objective = QRegularized(hidden_sizes=(8,))
    agent = small_agent(some_trajectories(NESTED), conditioning=conditioning, objective=objective)
    step = step_of(agent)
    with silenced():
        program = trace_step(step, vars(agent.policy.transformer.spec))
    assert largest_difference(agent, program.module(), step) < 1e-5


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("conditioning", [ElasticHistory(), TargetReturn()])
def test_onnxruntime_acts_as_predict(conditioning, tmp_path):
    """The candidates of an elastic history are equal in the first steps of an episode."""
    pytest.importorskip("onnxruntime")
    agent = small_agent(conditioning=conditioning)
    agent.export(tmp_path / "policy.onnx", n_envs=ENVS)
    player, episodes, state, own = Player(tmp_path / "policy.onnx"), Episodes(agent), None, None
    for number in range(40):
        observation, start = episodes.next(number)
        expected, state = agent.predict(observation, state, start)
        action, own = player.predict(observation, own, start)
        np.testing.assert_allclose(action, expected, atol=1e-4)
        episodes.previous = expected


def test_context_of_the_episode_is_refused(tmp_path):
    core = TransformerSpec(**SIZES, recurrence=GatedDeltaNet())
    agent = small_agent(context="episode", core=core)
    with pytest.raises(ValueError, match=r"export needs an agent that acts from a window.*context='window'"):
        agent.export(tmp_path / "policy.onnx")
