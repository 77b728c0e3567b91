"""Observations as features: normalised, images through a convolutional network."""

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.torch_layers import NatureCNN
from torch import Tensor, nn

SMALLEST = 36
"""Height and width, in pixels, from which SB3's `NatureCNN` can read an image."""


class ObservationFeatures(nn.Module):
    """``extractor(normalization(observation))``.

    Vectors are features as they are. Images of at least 36 x 36 pixels go through SB3's `NatureCNN` (Mnih et
    al. 2015), smaller ones are features pixel by pixel.

    Args:
        shape: of one encoded observation, (D,) or (C, H, W).
        normalization: brings observations to one scale.
    """

    def __init__(self, shape: tuple[int, ...], normalization: nn.Module):
        super().__init__()
        self.axes = len(shape)
        self.normalization = normalization
        self.extractor: nn.Module = nn.Flatten()
        self.width = int(np.prod(shape))
        if len(shape) == 3 and min(shape[1:]) >= SMALLEST:
            self.extractor = NatureCNN(spaces.Box(0, 255, shape, np.uint8))
            self.width = self.extractor.features_dim

    def forward(self, observations: Tensor) -> Tensor:
        """(B, W, D) or (B, W, C, H, W) -> (B, W, F)."""
        normalised = self.normalization(observations)
        if self.axes == 1:
            return normalised
        features: Tensor = self.extractor(normalised.flatten(0, 1))
        return features.unflatten(0, observations.shape[:2])
