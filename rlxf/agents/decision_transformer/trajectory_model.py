"""What reads steps of trajectories through a transformer."""

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
    """``steps -> tokens -> transformer``; what stands on top is its heirs'.

    Args:
        observation_shape: of one encoded observation.
        actions: how actions are read.
        normalization: brings observations to one scale.
        core: the transformer.
        return_scale: what returns are divided by.
        episode_length: time steps that have an embedding of their own.
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
        """Give all but the reading of images the weights that GPT-2 starts with."""
        for part in (self.tokens, self.transformer, *heads):
            start_as_gpt2(part)
        shrink_branches(self.transformer)

    def steps(self, batch: WindowBatch) -> Steps:
        """Windows as the model reads them."""
        features = self.features(batch.observations)
        return Steps(features, batch.actions, batch.return_to_go, batch.time_steps, batch.mask)

    @abstractmethod
    def read(self, steps: Steps) -> Tensor:
        """Outputs for the heads."""

    @abstractmethod
    def losses(self, batch: Any) -> dict[str, Tensor]:
        """What is minimised, "loss", and its parts, for what an update learns from."""

    @abstractmethod
    def weight(self, batch: Any) -> Tensor:
        """How many steps or tokens the `losses` of a batch are means over, a number."""

    def with_penalty(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parts of a loss, and what the transformer adds: a penalty as of long spans, and its depth."""
        penalty, depth = self.transformer.penalty(), self.transformer.mean_depth()
        if penalty is not None:
            parts = parts | {"loss": parts["loss"] + penalty, "penalty": penalty}
        return parts if depth is None else parts | {"mean_depth": depth}
