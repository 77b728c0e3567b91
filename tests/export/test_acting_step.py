"""Conversion of actions in exported steps, compared with that of acting agents."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf.agents.common.actions import to_environment
from rlxf.export.acting_step import EnvironmentActions

SPACES = [
    spaces.Discrete(3, start=-2),
    spaces.MultiBinary(2),
    spaces.MultiDiscrete([3, 4], start=[5, 1]),
    spaces.MultiDiscrete([3, 4], dtype=np.uint16),
    spaces.MultiDiscrete([3, 4], dtype=np.uint64),
    spaces.Box(-1, 2, (2,), np.float16),
    spaces.Box(-1, 2, (2,), np.float64),
    spaces.Box(-3, 4, (2,), np.int32),
    spaces.Box(0, 2**16 - 1, (2,), np.uint16),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_exported_actions_equal_those_of_an_agent(space):
    box = isinstance(space, spaces.Box)
    actions = torch.linspace(-9, 9, 8).view(-1, 2) if box else torch.ones(4, *space.shape, dtype=torch.int64)
    expected = to_environment(actions, space)
    converted = EnvironmentActions(space)(actions).numpy()
    assert converted.dtype == expected.dtype
    np.testing.assert_array_equal(converted, expected)
