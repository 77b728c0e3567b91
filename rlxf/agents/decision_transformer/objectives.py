"""Training objectives of the Decision Transformer."""

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from rlxf.agents.common.actions import BoxActions, DiscreteActions
from rlxf.agents.common.losses import masked_mean
from rlxf.agents.decision_transformer.heads import (
    CategoricalHead,
    DeterministicHead,
    Head,
    SquashedGaussianHead,
    StochasticHead,
)


@dataclass(frozen=True)
class Imitation:
    """Behavior cloning: ``mean of error(a_t)`` over the real (unpadded) steps.

    The error is the squared error for Box actions and the cross-entropy for discrete actions.

    Source: Chen et al. 2021, arXiv:2106.01345, section 3.
    """

    paper: ClassVar[str] = "Chen et al. 2021, arXiv:2106.01345"

    def build(self, width: int, actions: BoxActions | DiscreteActions) -> "ImitationLoss":
        """Build the loss and its head."""
        head: type[Any] = actions.select(continuous=DeterministicHead, discrete=CategoricalHead)
        return ImitationLoss(head(width, actions))


@dataclass(frozen=True)
class MaximumEntropy:
    r"""Maximum entropy: ``mean of -log p(a_t) - lambda H`` over the real (unpadded) steps.

    lambda > 0 is the dual variable of the constraint ``H >= beta`` on the entropy H. It is trained jointly
    and minimizes ``lambda (H - beta)``, so it grows while the entropy is below beta. Box actions are drawn
    from a squashed Gaussian.

    Source: Zheng et al. 2022, arXiv:2202.05607, section 4, equations 6 to 8.

    Args:
        temperature: initial lambda.
        target_entropy: beta, in nats. None: -A for Box actions of A dimensions, as in the paper; a fifth of
            the largest entropy for discrete actions.

    Raises:
        ValueError: if temperature is not finite and more than 0, or target_entropy is not finite.
    """

    paper: ClassVar[str] = "Zheng et al. 2022, arXiv:2202.05607"
    temperature: float = 0.1
    target_entropy: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and more than 0, got {self.temperature}")
        if self.target_entropy is not None and not math.isfinite(self.target_entropy):
            raise ValueError(f"target_entropy must be finite, or None, got {self.target_entropy}")

    def build(self, width: int, actions: BoxActions | DiscreteActions) -> "MaximumEntropyLoss":
        """Build the loss and its head."""
        head: type[Any] = actions.select(continuous=SquashedGaussianHead, discrete=CategoricalHead)
        return MaximumEntropyLoss(head(width, actions), self.temperature, self.target_entropy)


class ImitationLoss(nn.Module):
    """Loss of `Imitation` with its action head."""

    def __init__(self, head: Head):
        super().__init__()
        self.head = head

    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Compute "loss" from y (..., C), the actions of the dataset, and weights (...), 0 for padding."""
        return {"loss": masked_mean(self.head.error(y, actions), weight)}


class MaximumEntropyLoss(nn.Module):
    """Loss of `MaximumEntropy` with its action head and log lambda."""

    def __init__(self, head: StochasticHead, temperature: float, target_entropy: float | None):
        super().__init__()
        self.head = head
        self.target_entropy = head.default_target_entropy() if target_entropy is None else target_entropy
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))

    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Compute "loss" and its parts from y (..., C), the actions of the dataset, and weights (...).

        Padding has weight 0.
        """
        error = masked_mean(self.head.error(y, actions), weight)
        entropy = masked_mean(self.head.entropy(y), weight)
        temperature = self.log_temperature.exp()
        dual = temperature * (entropy.detach() - self.target_entropy)
        loss = error - temperature.detach() * entropy + dual
        return {
            "loss": loss,
            "nll": error,
            "entropy": entropy,
            "ent_coef": temperature,
            "ent_coef_loss": dual,
        }


Objective: TypeAlias = Imitation | MaximumEntropy
OBJECTIVES: dict[str, type[Objective]] = {choice.__name__: choice for choice in (Imitation, MaximumEntropy)}


def objective_to_json(objective: Objective) -> dict[str, Any]:
    """Return ``{"name": class name, **options}``."""
    return {"name": type(objective).__name__, **asdict(objective)}


def objective_from_json(data: dict[str, Any]) -> Objective:
    """Restore an objective from the result of `objective_to_json`.

    Raises:
        ValueError: if the name is unknown.
    """
    options = dict(data)
    name = options.pop("name", None)
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; use one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name](**options)
