"""Small environments and agents with returns in closed form, and a return-conditioned agent."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper

from rlxf.data import ReferenceScores


class Countdown(gymnasium.Env):
    """Environment with episodes of n = ``length`` steps and rewards 1, 2, ..., n: return n (n + 1) / 2."""

    def __init__(self, length: int = 3, truncates: bool = False, last_info: dict[str, Any] | None = None):
        self.length, self.truncates, self.last_info = length, truncates, last_info or {}
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(100)
        self.time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.look(), {}

    def step(self, action):
        self.time += 1
        done = self.time == self.length
        info = self.last_info if done else {}
        return (
            self.look(),
            self.reward(action),
            done and not self.truncates,
            done and self.truncates,
            dict(info),
        )

    def look(self) -> np.ndarray:
        return np.array([self.time], np.float32)

    def reward(self, action: int) -> float:
        return float(self.time)


class CountAloud(Countdown):
    """Environment with reward 1 for each action that equals the number of past steps; zero observations."""

    def look(self) -> np.ndarray:
        return np.zeros(1, np.float32)

    def reward(self, action: int) -> float:
        return float(action == self.time - 1)


class Broken(Countdown):
    """Environment whose second reward is ``value``."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def reward(self, action: int) -> float:
        return self.value if self.time == 2 else 0.0


class Blurred(Countdown):
    """Environment whose observation after ``step`` steps is ``value``."""

    def __init__(self, value: float, step: int):
        super().__init__()
        self.value, self.step_number = value, step

    def look(self) -> np.ndarray:
        return np.array([self.value if self.time == self.step_number else 0.0], np.float32)


class Lottery(Countdown):
    """Environment with episodes of one step and random rewards."""

    def __init__(self) -> None:
        super().__init__(length=1)

    def reward(self, action: int) -> float:
        return float(self.np_random.normal())


class Idle:
    """Agent that always takes action 0."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return np.zeros(len(observation), np.int64), None


class Counter:
    """Agent whose action is the number of steps of its episode, which it keeps in its state."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        steps = np.zeros(len(observation), np.int64) if state is None else state
        steps = np.where(episode_start, 0, steps)
        return steps, steps + 1


class NextStepReset(VecEnvWrapper):
    """Wrapper with next-step autoreset, as in Gymnasium; reset steps have reward 1000."""

    def reset(self):
        self.ended = np.zeros(self.num_envs, dtype=bool)
        self.first = self.venv.reset().copy()
        return self.first

    def step_async(self, actions):
        self.actions = actions

    def step_wait(self):
        obs, rewards, dones = self.first.copy(), np.full(self.num_envs, 1000.0), self.ended.copy()
        infos: list[dict[str, Any]] = [{"filler": True} for _ in dones]
        for i, env in enumerate(self.venv.envs):
            if not self.ended[i]:
                obs[i], rewards[i], terminated, truncated, infos[i] = env.step(self.actions[i])
                dones[i] = terminated or truncated
            else:
                obs[i], dones[i] = env.reset()[0], False
        self.ended = dones
        return obs, rewards, dones, infos


def vec(*envs: gymnasium.Env) -> DummyVecEnv:
    """Return a `DummyVecEnv` of the environments."""
    return DummyVecEnv([lambda env=env: env for env in envs])


class ActionRewardEnv(Countdown):
    """Environment with episodes of four steps; the reward is the action, a number from 0 to 1."""

    def __init__(self) -> None:
        super().__init__(length=4)
        self.action_space = spaces.Box(0, 1, (1,), np.float32)

    def reward(self, action) -> float:
        return float(np.clip(action[0], 0, 1))


class TargetFollower:
    """Agent that spreads the return-to-go evenly over the remaining steps; its data have returns 1 to 3."""

    return_range = (1.0, 3.0)
    reference_scores = ReferenceScores(1.0, 3.0, "metadata of test/purse-v0")
    num_timesteps = 7

    def make_env(self, n_envs, seed):
        return vec(*(ActionRewardEnv() for _ in range(n_envs)))

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        return observation["return_to_go"] / (4 - observation["time_step"]), None


def learner(env) -> PPO:
    """Make an agent with short rollouts."""
    return PPO("MlpPolicy", env, n_steps=8, batch_size=8, n_epochs=1, seed=0, device="cpu")
