"""Tests of returns-to-go, statistics and normalization of trajectories."""

import numpy as np
import pytest
import torch

from rlxf.data import return_to_go
from rlxf.data.trajectories import RunningStats, ScaleImages, Standardize


def test_standardized_vectors_have_mean_0_and_standard_deviation_1():
    data = np.random.default_rng(0).normal(size=(500, 3)) * [1, 10, 0.1] + [0, -4, 7]
    layer = Standardize(data.mean(axis=0, dtype=np.float32), data.std(axis=0, dtype=np.float32))
    scaled = layer(torch.tensor(data, dtype=torch.float32))
    torch.testing.assert_close(scaled.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_mean_and_std_are_buffers():
    layer = Standardize([1.0, 2.0], [3.0, 4.0])
    other = Standardize([0.0, 0.0], [1.0, 1.0])
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(torch.ones(2)), layer(torch.ones(2)))
    assert not list(layer.parameters())


def test_images_are_scaled_to_0_and_1():
    scaled = ScaleImages()(torch.tensor([0, 51, 255], dtype=torch.uint8))
    torch.testing.assert_close(scaled, torch.tensor([0.0, 0.2, 1.0]))


@pytest.mark.parametrize("length", [1, 2, 50])
def test_return_to_go_is_the_sum_of_future_rewards(length):
    rewards = np.random.default_rng(0).normal(size=length)
    slow = [sum(rewards[t:]) for t in range(length)]
    np.testing.assert_allclose(return_to_go(rewards), slow, rtol=1e-12)


def test_sums_have_float64_precision():
    rewards = np.array([1e8] + [1.0] * 1000, np.float32)
    assert return_to_go(rewards)[0] == 1e8 + 1000


RNG = np.random.default_rng(0)


def moments_of(rows, *cuts):
    moments = RunningStats(rows.shape[1])
    for piece in np.split(rows, cuts):
        moments.add(piece)
    return moments


@pytest.mark.parametrize(
    "cuts", [(), (1, 2, 3), (40,), (99,)], ids=["whole", "single rows", "halves", "rest"]
)
def test_moments_of_pieces_equal_those_of_the_whole(cuts):
    rows = RNG.normal(size=(100, 4)) * [1, 10, 0.01, 1e-3] + [0, 5, -3, 0]
    moments = moments_of(rows, *cuts)
    np.testing.assert_allclose(moments.mean, rows.mean(axis=0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(moments.std, rows.std(axis=0), rtol=1e-6)


def test_columns_far_from_zero_keep_their_precision():
    rows = 1e7 + RNG.normal(size=(1000, 1))
    np.testing.assert_allclose(moments_of(rows, 10, 500).std, rows.std(), rtol=1e-6)


def test_constant_columns_have_standard_deviation_1():
    rows = np.full((50, 2), 0.1, np.float32)
    moments = moments_of(rows, 7)
    np.testing.assert_array_equal(moments.std, [1, 1])
    np.testing.assert_array_equal(moments.mean, rows[0])
