"""Training objectives of offline agents: imitation, maximum entropy, and imitation with a critic."""

from typing import Any, TypeAlias

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
    "objective_from_json",
]

Objective: TypeAlias = Imitation | MaximumEntropy | QRegularized
OBJECTIVES: dict[str, type[Objective]] = {
    choice.__name__: choice for choice in (Imitation, MaximumEntropy, QRegularized)
}


def objective_from_json(data: dict[str, Any]) -> Objective:
    """Restore an objective from the result of `rlxf.attention.registry.technique_to_json`.

    Raises:
        ValueError: if the name is unknown.
    """
    options = dict(data)
    name = options.pop("name", None)
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; use one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name](**options)
