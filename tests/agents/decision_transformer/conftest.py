"""What these tests share."""

import pytest

from rlxf.envs.trajectories import load_trajectories
from tests.datasets import ID, record_cartpole


@pytest.fixture
def cartpole(minari_root):
    """Random numbers that are said to come from CartPole-v1."""
    record_cartpole()
    return load_trajectories(ID)
