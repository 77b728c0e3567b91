"""Environments with known recordings, and agents for them."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.evaluation.worlds import Countdown


class Diary(Countdown):
    """Observation [episode, step], reward = action; episode e has e + 2 steps, every second is truncated."""

    def __init__(self, as_dict: bool = False, dtype: Any = np.float64):
        super().__init__()
        box = spaces.Box(-np.inf, np.inf, (2,), dtype)
        self.as_dict = as_dict
        self.observation_space = spaces.Dict({"page": box, "mark": spaces.Discrete(3)}) if as_dict else box
        self.action_space = spaces.Box(-40, 40, (1,), np.float32)
        self.number = 0

    def reset(self, *, seed=None, options=None):
        self.number = 0 if seed is not None else self.number + 1
        self.length, self.truncates = self.number + 2, bool(self.number % 2)
        return super().reset(seed=seed)

    def look(self) -> Any:
        page = np.array([self.number, self.time], np.float64)
        return {"page": page, "mark": self.time % 3} if self.as_dict else page

    def reward(self, action) -> float:
        return float(action[0])


class Noise(gymnasium.Env):
    """Episodes of ``length`` steps with random rewards in [-1, 1], whatever the actions in [-4, 4]."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-4, 4, (1,), np.float32)

    def __init__(self, length: int):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        reward = float(self.np_random.uniform(-1, 1))
        return np.zeros(1, np.float32), reward, self.time == self.length, False, {}


class Pointer:
    """Agent whose action is the number of steps of the episode, which it keeps in its state."""

    def __init__(self):
        self.calls = 0

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        self.calls += 1
        steps = np.zeros(len(episode_start)) if state is None else state
        steps = np.where(episode_start, 0, steps)
        return steps[:, None].astype(np.float32), steps + 1


class Failing(Diary):
    """Environment that raises, or returns NaN or infinity, at the third step of its second episode."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.number == 1 and self.time == 3:
            if self.how == "dies":
                raise RuntimeError("the engine stalled")
            observation, reward = {
                "observation": (observation * np.nan, reward),
                "reward": (observation, np.inf),
            }[self.how]
        return observation, reward, *rest


gymnasium.register("rlxf-test/Diary-v0", entry_point="tests.collection.worlds:Diary")
