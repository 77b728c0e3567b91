"""What these tests share."""

import gymnasium
import numpy as np
import pytest

from rlxf.envs.trajectories import load_trajectories
from tests.datasets import record_random


@pytest.fixture
def cartpole(minari_root):
    """Random numbers that are said to come from CartPole-v1."""
    env = gymnasium.make("CartPole-v1")
    bounds = np.array([4.8, 5, 0.4, 5], np.float32)
    drawn = gymnasium.spaces.Box(-bounds, bounds)
    env.observation_space.sample, drawn.sample = drawn.sample, env.observation_space.sample
    record_random(
        (9, 3, 12, 1), observation_space=env.observation_space, action_space=env.action_space, env=env
    )
    return load_trajectories("test/small-v0")
