"""Training objectives of offline agents: imitation, maximum entropy, and imitation with a critic."""

from typing import TypeAlias

from rlxf.agents.offline.objectives.base import ObjectiveLoss, ObjectiveSpec
from rlxf.agents.offline.objectives.imitation import Imitation
from rlxf.agents.offline.objectives.maximum_entropy import MaximumEntropy
from rlxf.agents.offline.objectives.q_regularized import QRegularized

__all__ = [
    "Imitation",
    "MaximumEntropy",
    "QRegularized",
    "Objective",
    "ObjectiveSpec",
    "ObjectiveLoss",
    "OBJECTIVES",
]

Objective: TypeAlias = Imitation | MaximumEntropy | QRegularized
OBJECTIVES: dict[str, type[Objective]] = {
    choice.__name__: choice for choice in (Imitation, MaximumEntropy, QRegularized)
}
