"""Return-conditioned agent that achieves its target exactly if possible, and its environment."""

import numpy as np
from gymnasium import spaces

from rlxf.data import ReferenceScores
from tests.evaluation.tasks import Countdown, vec


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
