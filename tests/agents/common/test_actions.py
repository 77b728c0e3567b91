"""Conversion of actions to the action space."""

import numpy as np
import torch
from gymnasium import spaces

from rlxf.agents.common.actions import to_environment


def test_box_actions_are_clipped_and_shaped():
    space = spaces.Box(-1.0, 2.0, (2, 1), np.float32)
    actual = to_environment(torch.tensor([[-3.0, 0.5], [1.0, 7.0]]), space)
    np.testing.assert_array_equal(actual, np.array([[[-1], [0.5]], [[1], [2]]], np.float32))
    assert actual.dtype == np.float32


def test_integer_boxes_are_rounded():
    space = spaces.Box(-3, 3, (4,), np.int64)
    actual = to_environment(torch.tensor([[0.9, -0.9, 2.4, 5.0]]), space)
    assert actual.tolist() == [[1, -1, 2, 3]]
    assert actual.dtype == np.int64


def test_discrete_actions_are_shifted_by_start():
    space = spaces.MultiDiscrete([2, 3], start=[-1, 4])
    actual = to_environment(torch.tensor([[1, 0], [0, 2]]), space)
    assert actual.tolist() == [[0, 4], [-1, 6]]
    assert to_environment(torch.tensor([0, 2]), spaces.Discrete(3, start=5)).tolist() == [5, 7]


def test_bits_have_dtype_of_space():
    actual = to_environment(torch.tensor([[1, 0, 1]]), spaces.MultiBinary(3))
    assert (actual.tolist(), actual.dtype) == ([[1, 0, 1]], np.int8)
