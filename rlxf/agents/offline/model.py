"""Base class of the models of offline agents, and features of observations."""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.torch_layers import NatureCNN
from torch import Tensor, nn

from rlxf.agents.common.precision import Precision, mixed_precision
from rlxf.data import Trajectories, Windows
from rlxf.data.encoders import has_image_extractor


class OfflineModel(nn.Module, ABC):
    """Base class of models that `OfflineAlgorithm` trains on windows of trajectories."""

    @abstractmethod
    def windows(self, trajectories: Trajectories) -> Windows:
        """Return the windows of trajectories that the model is trained on."""

    @abstractmethod
    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the "loss" and its parts for a batch."""

    def needed_columns(self, windows: Windows) -> Windows:
        """Return windows with the columns on which losses depend; here all."""
        return windows

    @abstractmethod
    def loss_count(self, batch: Any) -> Tensor:
        """Return the number of steps or tokens over which the `losses` of a batch are averaged, a scalar."""

    @abstractmethod
    def validation_losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the "loss" by which checkpoints are compared, and its parts if it has several.

        It is the error of predictions of the data without the terms that training adds, such as penalties,
        averaged over `loss_count` steps or tokens.
        """

    @abstractmethod
    def product_size(self, batch: Any) -> int:
        """Return the multiply-adds of a typical matrix product of a batch; see `float32_products`."""

    precision: Precision = "float32"
    """Precision of updates; acting and validation use float32."""

    def mixed_precision(self) -> AbstractContextManager[None]:
        """Return the context in which the model computes the outputs that its losses use."""
        return mixed_precision(self.precision, self.training)

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the parameters and buffers on which actions depend, by name; here all."""
        return self.state_dict()

    def fit(self, data: Trajectories) -> None:  # optional
        """Set the buffers that depend on the training data."""

    def check_data(self, data: Trajectories, device: torch.device) -> None:  # optional
        """Raise ValueError if the model cannot be trained on these data.

        Args:
            data: training data.
            device: device of the model.
        """

    def check_episodes(self, data: Trajectories, episodes: NDArray[np.int64]) -> None:  # optional
        """Raise ValueError if the model cannot be trained on some episodes of the data.

        Args:
            data: training data, with held-out episodes.
            episodes: numbers of the episodes to train on, int64 (n,).
        """

    def check_processes(self, world_size: int) -> None:  # optional
        """Raise ValueError if the model does not support this number of processes."""

    def check_stored_parameters(self, tensors: Mapping[str, Tensor]) -> None:  # optional
        """Raise CheckpointError if tensors of a file, by name, are finite but invalid for the model."""

    def capture_settings(self) -> Hashable:
        """Return numbers that `losses` reads from attributes and that may change between updates."""
        return self.precision

    def check_capture(self) -> None:  # optional
        """Raise CompilationError, with the reason, if branches of `losses` depend on values of tensors."""

    def after_losses(self) -> None:  # optional
        """Check the numbers that `losses` has stored in buffers, outside of a captured graph."""

    def after_update(self) -> None:  # optional
        """Update state that depends on the weights, after each optimizer step."""


IMAGE_FEATURES = 512
"""Number of features of `NatureCNN`."""


def feature_width(shape: tuple[int, ...]) -> int:
    """Return the number of features of an encoded observation, (D,) or (C, H, W)."""
    return IMAGE_FEATURES if has_image_extractor(shape) else math.prod(shape)


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
        self.width = feature_width(shape)
        if has_image_extractor(shape):
            self.extractor = NatureCNN(spaces.Box(0, 255, shape, np.uint8), IMAGE_FEATURES)

    def forward(self, observations: Tensor) -> Tensor:
        """Extract features (B, W, F) from observations (B, W, D) or (B, W, C, H, W)."""
        normalized = self.normalization(observations)
        if self.axes == 1:
            return normalized
        features: Tensor = self.extractor(normalized.flatten(0, 1))
        return features.unflatten(0, observations.shape[:2])
