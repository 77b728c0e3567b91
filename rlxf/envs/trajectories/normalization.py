"""Observations on one scale, as a layer: what is trained with is acted with."""

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn


class Standardize(nn.Module):
    """``(x - mean) / std`` for vector observations.

    Mean and std are buffers: they are saved with the model and move to its device.

    Args:
        mean: (D,).
        std: (D,), none of them 0.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: ArrayLike, std: ArrayLike):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, observations: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return (observations - self.mean) / self.std


class ScaleImages(nn.Module):
    """``x / 255`` for images: uint8 -> float32 in [0, 1]."""

    def forward(self, observations: Tensor) -> Tensor:
        """(..., C, H, W) -> the same shape."""
        return observations / 255
