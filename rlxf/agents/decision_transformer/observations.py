"""Feature extraction from observations: normalization, and a convolutional network for images."""

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.torch_layers import NatureCNN
from torch import Tensor, nn

SMALLEST = 36
"""Smallest height and width, in pixels, of an image for SB3's `NatureCNN`."""


class ObservationFeatures(nn.Module):
    """Features ``extractor(normalization(observation))``.

    The extractor is the identity for vectors. Images of at least 36 x 36 pixels pass through SB3's
    `NatureCNN` (Mnih et al. 2015); smaller images are flattened.

    Args:
        shape: shape of one encoded observation, (D,) or (C, H, W).
        normalization: normalization layer of observations.
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
        """Extract features (B, W, F) from observations (B, W, D) or (B, W, C, H, W)."""
        normalized = self.normalization(observations)
        if self.axes == 1:
            return normalized
        features: Tensor = self.extractor(normalized.flatten(0, 1))
        return features.unflatten(0, observations.shape[:2])
