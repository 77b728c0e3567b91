"""Shared fixtures."""

import pytest

from rlxf.data import load_trajectories
from tests.datasets import ID, record_cartpole


@pytest.fixture
def cartpole(minari_root):
    """Return trajectories of random numbers with the spaces and the spec of CartPole-v1."""
    record_cartpole()
    return load_trajectories(ID)
