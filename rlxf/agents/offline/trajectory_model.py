"""Transformer over trajectories: tokens of returns-to-go, observations and actions, and their outputs."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import NatureCNN
from torch import Tensor, nn

from rlxf.agents.common.actions import BoxActions, DiscreteActions
from rlxf.agents.decision_transformer.core import init_gpt2_weights, memory_steps, scale_residual_projections
from rlxf.agents.offline.context_window import TOKENS, ContextWindow
from rlxf.attention import TransformerSpec
from rlxf.attention.dropout import Dropout
from rlxf.data import WindowBatch

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


class StepTokens(nn.Module):
    r"""Tokens ``LN(W_R R_t / scale + w(t)), LN(W_s s_t + w(t)), LN(W_a a_t + w(t))`` of consecutive steps.

    w(t) is the learned embedding of time step t. Time steps beyond the last embedding share the last one.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3; layer normalization as in the authors' code.

    Args:
        features: number of features F of an observation.
        actions: conversion of actions to network inputs.
        width: number of features C of a token.
        return_scale: divisor of returns.
        episode_length: number of time steps with an embedding.
        dropout: dropout probability of token features in training.
    """

    def __init__(
        self,
        features: int,
        actions: BoxActions | DiscreteActions,
        width: int,
        return_scale: float,
        episode_length: int,
        dropout: float,
    ):
        super().__init__()
        self.return_scale = return_scale
        self.actions = actions
        self.time = nn.Embedding(episode_length, width)
        self.return_embedding = nn.Linear(1, width)
        self.state_embedding = nn.Linear(features, width)
        self.action_embedding = nn.Linear(actions.width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(self, steps: ContextWindow) -> Tensor:
        """Embed steps (B, W) as tokens (B, 3 W, C)."""
        return self.timed(self.contents(steps), steps.time_steps)

    def contents(self, steps: ContextWindow) -> Tensor:
        """Compute ``W_R R_t / scale, W_s s_t, W_a a_t``, the embeddings without time, (B, W, 3, C)."""
        returns = self.return_embedding(steps.return_to_go[..., None] / self.return_scale)
        states = self.state_embedding(steps.features)
        actions = self.action_embedding(self.actions(steps.actions))
        contents = torch.stack([returns, states, actions], dim=2)
        assert contents.shape[2] == TOKENS
        return contents

    def timed(self, contents: Tensor, time_steps: Tensor) -> Tensor:
        """Add time-step embeddings to contents (B, W, 3, C), then normalize and flatten: (B, 3 W, C)."""
        time = self.time(time_steps.clamp(max=self.time.num_embeddings - 1))
        tokens = contents + time[:, :, None]
        token: Tensor = self.dropout(self.norm(tokens.flatten(1, 2)))
        return token


class TrajectoryModel(nn.Module, ABC):
    """Base class of models ``steps -> tokens -> transformer``; subclasses add heads.

    Args:
        observation_shape: shape of one encoded observation.
        actions: conversion of actions to network inputs.
        normalization: normalization layer of observations.
        core: spec of the transformer.
        return_scale: divisor of returns.
        episode_length: number of time steps with an embedding.
    """

    def __init__(
        self,
        observation_shape: tuple[int, ...],
        actions: BoxActions | DiscreteActions,
        normalization: nn.Module,
        core: TransformerSpec,
        return_scale: float,
        episode_length: int,
    ):
        super().__init__()
        self.burn_in_steps = memory_steps(core)
        self.features = ObservationFeatures(observation_shape, normalization)
        self.tokens = StepTokens(
            self.features.width, actions, core.width, return_scale, episode_length, core.dropout
        )
        self.transformer = core.build()

    def start(self, *heads: nn.Module) -> None:
        """Initialize all modules except the image feature extractor as in GPT-2."""
        for part in (self.tokens, self.transformer, *heads):
            init_gpt2_weights(part)
        scale_residual_projections(self.transformer)

    def steps(self, batch: WindowBatch) -> ContextWindow:
        """Convert a batch of windows to steps with observation features."""
        features = self.features(batch.observations)
        return ContextWindow(features, batch.actions, batch.return_to_go, batch.time_steps, batch.mask)

    @abstractmethod
    def outputs(self, steps: ContextWindow) -> Tensor:
        """Return the transformer outputs that are the inputs of the heads."""

    @abstractmethod
    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the "loss" and its parts for a batch."""

    @abstractmethod
    def weight(self, batch: Any) -> Tensor:
        """Return the number of steps or tokens over which the `losses` of a batch are averaged, a scalar."""

    def add_penalty(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the transformer's penalty, such as that of adaptive spans, and its mean depth to the parts."""
        penalty, depth = self.transformer.penalty(), self.transformer.mean_depth()
        if penalty is not None:
            parts = parts | {"loss": parts["loss"] + penalty, "penalty": penalty}
        return parts if depth is None else parts | {"mean_depth": depth}
