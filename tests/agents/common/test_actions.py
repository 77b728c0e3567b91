"""Conversion of actions to the action space."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlxf.agents.common.actions import action_encoder, to_environment


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


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.uint64, np.uint8])
def test_actions_beyond_the_range_of_the_dtype_are_clipped(dtype):
    limits = np.finfo(dtype) if np.issubdtype(dtype, np.floating) else np.iinfo(dtype)
    space = spaces.Box(limits.min, limits.max, (3,), dtype)
    actual = to_environment(torch.tensor([[-1e30, 7.0, 1e30]]), space)
    assert actual.dtype == dtype
    assert actual.tolist() == [[limits.min, 7, limits.max]]


def test_discrete_actions_are_shifted_by_start():
    space = spaces.MultiDiscrete([2, 3], start=[-1, 4])
    actual = to_environment(torch.tensor([[1, 0], [0, 2]]), space)
    assert actual.tolist() == [[0, 4], [-1, 6]]
    assert to_environment(torch.tensor([0, 2]), spaces.Discrete(3, start=5)).tolist() == [5, 7]


def test_bits_have_dtype_of_space():
    actual = to_environment(torch.tensor([[1, 0, 1]]), spaces.MultiBinary(3))
    assert (actual.tolist(), actual.dtype) == ([[1, 0, 1]], np.int8)


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (-100, 100, np.int8),
        (100, 200, np.uint8),
        (0, 1000, np.uint16),
        (-(2**31), 2**31 - 1, np.int32),
        (0, 2**32 - 1, np.uint32),
        (-60_000, 60_000, np.float16),
        (-2e38, 1e38, np.float32),
    ],
)
def test_bounds_are_scaled_to_1_without_overflow(low, high, dtype):
    encoder = action_encoder(spaces.Box(low, high, (2,), dtype))
    bounds = torch.tensor([[low, high], [high, low]], dtype=torch.float64).float()
    torch.testing.assert_close(encoder(bounds), torch.tensor([[-1.0, 1.0], [1.0, -1.0]]))
    assert encoder.bounded.all()


@pytest.mark.parametrize("bound", [np.finfo(np.float32).max, 1e300, np.inf])
def test_ranges_beyond_float32_are_not_scaled(bound):
    encoder = action_encoder(spaces.Box(-bound, bound, (2,), np.float64))
    actions = torch.tensor([[0.5, -7.0]])
    assert torch.equal(encoder(actions), actions)
    assert torch.equal(encoder.unscale(actions), actions)
    assert not encoder.bounded.any()


def test_boolean_boxes_are_refused():
    with pytest.raises(TypeError, match=r"Box actions must be numbers, got Box.*; use MultiBinary\(\(2,\)\)"):
        action_encoder(spaces.Box(0, 1, (2,), bool))
