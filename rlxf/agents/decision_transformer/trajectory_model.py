"""Base class of transformer models of trajectories."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from rlxf.agents.actions import BoxActions, ChoiceActions
from rlxf.agents.decision_transformer.core import remembered_steps, shrink_branches, start_as_gpt2
from rlxf.agents.decision_transformer.observations import ObservationFeatures
from rlxf.agents.decision_transformer.steps import Steps
from rlxf.agents.decision_transformer.tokens import StepTokens
from rlxf.attention import TransformerSpec
from rlxf.envs.trajectories import WindowBatch


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
        actions: BoxActions | ChoiceActions,
        normalization: nn.Module,
        core: TransformerSpec,
        return_scale: float,
        episode_length: int,
    ):
        super().__init__()
        self.remembered = remembered_steps(core)
        self.features = ObservationFeatures(observation_shape, normalization)
        self.tokens = StepTokens(
            self.features.width, actions, core.width, return_scale, episode_length, core.dropout
        )
        self.transformer = core.build()

    def start(self, *heads: nn.Module) -> None:
        """Initialize all modules except the image feature extractor as in GPT-2."""
        for part in (self.tokens, self.transformer, *heads):
            start_as_gpt2(part)
        shrink_branches(self.transformer)

    def steps(self, batch: WindowBatch) -> Steps:
        """Convert a batch of windows to steps with observation features."""
        features = self.features(batch.observations)
        return Steps(features, batch.actions, batch.return_to_go, batch.time_steps, batch.mask)

    @abstractmethod
    def read(self, steps: Steps) -> Tensor:
        """Return the transformer outputs that are the inputs of the heads."""

    @abstractmethod
    def losses(self, batch: Any) -> dict[str, Tensor]:
        """Return the "loss" and its parts for a batch."""

    @abstractmethod
    def weight(self, batch: Any) -> Tensor:
        """Return the number of steps or tokens over which the `losses` of a batch are averaged, a scalar."""

    def with_penalty(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the transformer's penalty, such as that of adaptive spans, and its mean depth to the parts."""
        penalty, depth = self.transformer.penalty(), self.transformer.mean_depth()
        if penalty is not None:
            parts = parts | {"loss": parts["loss"] + penalty, "penalty": penalty}
        return parts if depth is None else parts | {"mean_depth": depth}
