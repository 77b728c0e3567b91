""""""

import numpy as np
import torch

from rlxf.data.trajectories import ScaleImages, Standardize


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
