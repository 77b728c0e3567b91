"""Imitation of the actions of the data."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rlxf.agents.common.actions import BoxActions, DiscreteActions
from rlxf.agents.common.losses import masked_mean
from rlxf.agents.offline.heads import (
    CategoricalHead,
    DeterministicHead,
    Head,
)
from rlxf.agents.offline.objectives.base import ObjectiveLoss, ObjectiveSpec


@dataclass(frozen=True)
class Imitation(ObjectiveSpec):
    """Behavior cloning: ``mean of error(a_t)`` over the real (unpadded) steps.

    The error is the squared error for Box actions and the cross-entropy for discrete actions.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.
    """

    paper: ClassVar[str] = "Chen et al. 2021, arXiv:2106.01345"

    def build(self, width: int, actions: BoxActions | DiscreteActions, features: int) -> "ImitationLoss":
        """Build the loss and its head; arguments as in `QRegularized.build`."""
        head: type[Any] = actions.select(continuous=DeterministicHead, discrete=CategoricalHead)
        return ImitationLoss(head(width, actions))


class ImitationLoss(ObjectiveLoss):
    """Loss of `Imitation` with its action head."""

    def __init__(self, head: Head):
        super().__init__()
        self.head = head

    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"loss": masked_mean(self.head.error(y, actions), weight)}
