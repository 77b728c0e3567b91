"""Tests of training with the protocol of EnvPool: NEXT_STEP resets, fixed seeds, infos without masks."""

import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from rlxf import evaluate
from rlxf.envs import GymnasiumVecEnv, as_vec_env
from tests.agents.gtrxl.worlds import small_agent

LENGTHS = np.array([3, 4, 5])


class FakePool(VectorEnv, gymnasium.Env):
    """Three environments whose episodes last 3, 4 and 5 steps, with the interface of EnvPool."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = 3
    single_observation_space = observation_space = spaces.Box(0, 9, (1,), np.float32)
    single_action_space = action_space = spaces.Discrete(2)
    spec = object()  # of a class of EnvPool, without an id

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            warnings.warn("seeds are fixed when the environment is created", UserWarning, stacklevel=2)
        self.times = np.zeros(3, dtype=np.int32)
        return self.observe(), self.info()

    def step(self, actions: Any) -> Any:
        assert actions.shape == (3,)
        filler = self.times == LENGTHS
        self.times = np.where(filler, 0, self.times + 1).astype(np.int32)
        rewards = (~filler).astype(np.float32)
        return self.observe(), rewards, self.times == LENGTHS, np.zeros(3, dtype=bool), self.info()

    def observe(self) -> Any:
        return self.times[:, None].astype(np.float32)

    def info(self) -> dict[str, Any]:
        numbers = np.arange(3, dtype=np.int32)
        return {"env_id": numbers, "players": {"env_id": numbers}, "elapsed_step": self.times}


def check_training(env: Any, seed: int | None) -> list[tuple[float, int]]:
    """Train, check that reset steps are masked, and return the returns and lengths of the episodes."""
    assert isinstance(as_vec_env(env), GymnasiumVecEnv)
    agent = small_agent(env, seed=seed)
    agent.learn(16 * env.num_envs)
    buffer = agent.rollout_buffer
    after_end = buffer.dones[:, :-1] & (buffer.weight[:, :-1] == 1)
    assert (buffer.weight[:, 1:] == 0).equal(after_end)
    assert after_end.any()
    return [(episode["r"], episode["l"]) for episode in agent.ep_info_buffer]


def test_filler_rows_of_a_pool_are_masked():
    episodes = check_training(FakePool(), seed=None)
    assert sorted(set(episodes)) == [(3.0, 3), (4.0, 4), (5.0, 5)]


def test_a_pool_can_be_evaluated():
    report = evaluate(small_agent(FakePool()), FakePool(), episodes=6)
    assert sorted(set(report.returns)) == [3.0, 4.0, 5.0]


def test_envpool_trains():
    envpool = pytest.importorskip("envpool")
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=3, seed=0, max_episode_steps=8)
    episodes = check_training(pool, seed=None)
    assert all(reward == length for reward, length in episodes)
    evaluate(small_agent(pool), pool, episodes=2)
