"""Trajectories for tests of data."""

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.data import Trajectories

LENGTHS = (7, 1, 4, 12)


@pytest.fixture
def data():
    """Return trajectories whose values identify their step; no value is 0, unlike padding."""
    offsets = np.cumsum([0, *LENGTHS])
    steps = np.arange(1, offsets[-1] + 1)
    return Trajectories(
        observations=np.stack([steps, steps + 0.5], axis=1).astype(np.float32),
        actions=steps.astype(np.int64),
        rewards=steps.astype(np.float32),
        return_to_go=(100 * steps).astype(np.float32),
        offsets=offsets,
        terminated=np.ones(4, bool),
        truncated=np.zeros(4, bool),
        observation_mean=np.zeros(2, np.float32),
        observation_std=np.ones(2, np.float32),
        observation_space=spaces.Box(0, 99, (2,)),
        action_space=spaces.Discrete(99),
    )
