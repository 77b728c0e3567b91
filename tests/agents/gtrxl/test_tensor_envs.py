"""Tests of training in environments of tensors: it equals training with arrays, bit for bit."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NumpyToTorch
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnMaxEpisodes,
)
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import GTrXLPPO, evaluate
from rlxf.envs import FaultyEnvironmentError, TensorVecEnv, TMazeTensor, TMazeVector, as_vec_env
from rlxf.training import CheckpointFolder, CheckpointWriter
from tests.agents.gtrxl.worlds import ACTIONS, VECTOR, Scripted, parameters, shifted, small_agent
from tests.envs.tensor_envs import ArrayConversion, Overwriting, Tensors, needs_array_conversion

SAME, NEXT = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP
SPACES = ACTIONS | {"Box of float16": spaces.Box(-1, 2, (2,), np.float16)}


def scripted(mode: AutoresetMode, observations: spaces.Space = VECTOR, actions: str = "Discrete") -> Any:
    makes = [partial(Scripted, script, observations, SPACES[actions]) for script in shifted(3)]
    return SyncVectorEnv(makes, autoreset_mode=mode)


def trained(env: Any, policy: str = "MlpGTrXLPolicy", steps: int = 96, **changes: Any) -> GTrXLPPO:
    return small_agent(env, policy, **changes).learn(steps)


def assert_same(one: GTrXLPPO, other: GTrXLPPO) -> None:
    """Assert equal weights, bit for bit, and equal statistics of the episodes."""
    assert isinstance(one.env, TensorVecEnv)
    for x, y in zip(parameters(one), parameters(other), strict=True):
        assert torch.equal(x, y)
    episodes, expected = ([(each["r"], each["l"]) for each in agent.ep_info_buffer] for agent in (one, other))
    assert len(expected) > 2
    np.testing.assert_allclose(episodes, expected, rtol=1e-5)
    assert one.ep_success_buffer == other.ep_success_buffer


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_tensors_train_like_arrays_in_each_autoreset_mode(mode):
    assert_same(trained(Tensors(scripted(mode))), trained(scripted(mode)))


@pytest.mark.parametrize("actions", [name for name in SPACES if name != "Discrete"])
def test_tensors_train_like_arrays_with_each_action_space(actions):
    assert_same(trained(Tensors(scripted(NEXT, VECTOR, actions))), trained(scripted(NEXT, VECTOR, actions)))


def test_tensors_train_like_arrays_with_dict_observations():
    both = spaces.Dict({"number": spaces.Discrete(4), "vector": VECTOR})
    envs = [Tensors(scripted(SAME, both)), scripted(SAME, both)]
    assert_same(*(trained(env, "MultiInputGTrXLPolicy") for env in envs))


@pytest.mark.parametrize("mode", [SAME, NEXT])
def test_the_tmaze_trains_like_the_one_with_arrays(mode):
    tensors = TMazeTensor(3, 4, autoreset_mode=mode, device="cpu")
    assert_same(trained(tensors), trained(TMazeVector(3, 4, autoreset_mode=mode)))


def test_numpy_to_torch_trains_like_arrays():
    make = partial(gymnasium.make_vec, "CartPole-v1", 3, "sync", max_episode_steps=9)
    assert_same(trained(NumpyToTorch(make())), trained(make()))


@needs_array_conversion
def test_tensors_converted_to_numpy_train_like_arrays():
    converted = ArrayConversion(TMazeTensor(3, 4, device="cpu"), env_xp=torch, target_xp=np)
    assert_same(trained(TMazeTensor(3, 4, device="cpu")), trained(converted))


def test_environment_may_overwrite_its_tensors():
    assert_same(trained(Overwriting(scripted(NEXT))), trained(scripted(NEXT)))


def test_recomputed_memory_and_persistent_memory_train_like_arrays():
    for option in ("recompute_memory", "persist_memory_across_episodes"):
        agents = [trained(env, **{option: True}) for env in (Tensors(scripted(NEXT)), scripted(NEXT))]
        assert_same(*agents)


class Results(BaseCallback):
    """Callback that keeps the results of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.steps.append({name: self.locals[name] for name in ("new_obs", "rewards", "dones", "infos")})
        return True


def test_rollouts_hold_tensors_only(monkeypatch):
    """Between reset and the update, no observation, reward or action is converted to an array.

    Done flags are arrays, as in Stable-Baselines3.
    """
    agent = small_agent(TMazeTensor(3, 4, device="cpu"))
    results = Results()
    monkeypatch.setattr(agent.policy, "to_environment", None)
    agent.learn(48, callback=results)
    for step in results.steps:
        assert all(isinstance(step[name], torch.Tensor) for name in ("new_obs", "rewards"))
        assert isinstance(step["dones"], np.ndarray)
        ends = [i for i, info in enumerate(step["infos"]) if "episode" in info]
        assert ends == np.flatnonzero(step["dones"]).tolist()
        assert all(step["infos"][i]["terminal_observation"].shape == (2,) for i in ends)
    assert any(step["dones"].any() for step in results.steps)


def test_callbacks_of_stable_baselines3_work(tmp_path):
    """Callbacks save checkpoints, and evaluate as in environments of arrays."""
    scores = []
    for kind in (partial(TMazeTensor, device="cpu"), TMazeVector):
        folder = tmp_path / str(len(scores))
        other = as_vec_env(kind(2, 4))
        other.seed(5)
        evaluation = EvalCallback(other, n_eval_episodes=4, eval_freq=16, log_path=str(folder))
        checkpoints = CheckpointCallback(16, str(folder))
        small_agent(kind(3, 4)).learn(48, callback=[evaluation, checkpoints])
        assert len(list(folder.glob("rl_model_*_steps.zip"))) == 1
        scores.append(np.load(folder / "evaluations.npz"))
    assert scores[0]["results"].shape == (1, 4)
    np.testing.assert_allclose(scores[0]["results"], scores[1]["results"], rtol=1e-6)
    np.testing.assert_array_equal(scores[0]["successes"], scores[1]["successes"])


def test_training_stops_after_a_number_of_episodes():
    """`StopTrainingOnMaxEpisodes` sums ``dones`` with NumPy."""
    steps = []
    for env in (Tensors(scripted(NEXT)), scripted(NEXT)):
        agent = small_agent(env).learn(480, callback=StopTrainingOnMaxEpisodes(2))
        steps.append(agent.num_timesteps)
    assert steps[0] == steps[1] < 480


def test_evaluation_equals_that_with_arrays():
    agent = small_agent(TMazeTensor(3, 4, device="cpu"))
    reports = [
        evaluate(agent, env, episodes=6, deterministic=False)
        for env in (None, TMazeTensor(3, 4, device="cpu"), TMazeVector(3, 4))
        if torch.manual_seed(0)
    ]
    for report in reports[:2]:
        np.testing.assert_allclose(report.returns, reports[2].returns, rtol=1e-6)


def test_resumed_training_is_bit_identical(tmp_path):
    def made() -> GTrXLPPO:
        return small_agent(TMazeTensor(3, 4, device="cpu"), learning_rate=1e-3, ent_coef=0.01)

    whole = made().learn(96)
    made().learn(48, callback=CheckpointWriter(CheckpointFolder(tmp_path), every_seconds=0))
    assert_same(made().learn(96, resume_from=tmp_path), whole)


class Spoiled(Tensors):
    """Environment whose third step has NaN at environment 1."""

    steps, what = 0, "observation"

    def step(self, actions: Any) -> Any:
        obs, rewards, *rest = super().step(actions)
        self.steps += 1
        if self.steps == 2:
            {"observation": obs, "reward": rewards}[self.what][1] = torch.nan
        return obs, rewards, *rest


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_nan_is_reported_with_environment_and_step(what):
    env = Spoiled(scripted(NEXT))
    env.what = what
    with pytest.raises(FaultyEnvironmentError, match=f"{what} of environment 1 is not finite at its step 2"):
        small_agent(env).learn(48)


def test_observations_outside_of_their_space_are_reported_once():
    class Outside(Tensors):
        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            return obs + 2, *rest

    with pytest.warns(UserWarning, match="outside of its space") as caught:
        small_agent(Outside(scripted(NEXT))).learn(48)
    assert sum("outside" in str(each.message) for each in caught) == 1


def test_device_of_the_agent_must_be_that_of_the_tensors():
    env = TMazeTensor(3, device="cpu")
    agent = small_agent(env)
    agent.env.device = torch.device("meta")
    with pytest.raises(
        ValueError, match="are on meta, but the agent is on cpu: create the environments with"
    ):
        agent.learn(48)


def test_wrapper_with_arrays_is_reported_and_trains_like_arrays():
    normalized = [VecNormalize(as_vec_env(env)) for env in (Tensors(scripted(SAME)), scripted(SAME))]
    with pytest.warns(UserWarning, match="VecNormalize computes with NumPy arrays"):
        one = trained(normalized[0])
    for x, y in zip(parameters(one), parameters(trained(normalized[1])), strict=True):
        assert torch.equal(x, y)


def test_predict_accepts_tensors():
    agent = small_agent(TMazeTensor(3, 4, device="cpu"))
    observation = torch.rand(3, 2)
    actions, expected = (agent.predict(x, deterministic=True)[0] for x in (observation, observation.numpy()))
    np.testing.assert_array_equal(actions, expected)
