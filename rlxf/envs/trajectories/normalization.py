"""Normalization layers of observations, used alike in training and while acting."""

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn


class Standardize(nn.Module):
    """Standardization ``(x - mean) / std`` of vector observations.

    Mean and std are buffers: they are saved with the model and move to its device.

    Args:
        mean: (D,).
        std: (D,), nonzero.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: ArrayLike, std: ArrayLike):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, observations: Tensor) -> Tensor:
        """Standardize observations (..., D)."""
        return (observations - self.mean) / self.std


class ScaleImages(nn.Module):
    """Scaling ``x / 255`` of images: uint8 -> float32 in [0, 1]."""

    def forward(self, observations: Tensor) -> Tensor:
        """Scale images (..., C, H, W)."""
        return observations / 255
