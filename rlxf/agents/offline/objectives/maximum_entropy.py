"""Maximum-entropy objective: a stochastic policy that can be fine-tuned online."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlxf.agents.common.actions import BoxActions, DiscreteActions
from rlxf.agents.common.losses import masked_mean
from rlxf.agents.offline.heads import (
    CategoricalHead,
    SquashedGaussianHead,
    StochasticHead,
)
from rlxf.agents.offline.objectives.base import ObjectiveLoss, ObjectiveSpec
from rlxf.utils.checks import check_finite_number, check_positive


@dataclass(frozen=True)
class MaximumEntropy(ObjectiveSpec):
    r"""Maximum entropy: ``mean of -log p(a_t) - lambda H`` over the real (unpadded) steps.

    lambda > 0 is the dual variable of the constraint ``H >= beta`` on the entropy H. It is trained jointly
    and minimizes ``lambda (H - beta)``, so it grows while the entropy is below beta. Box actions are drawn
    from a squashed Gaussian.

    Source: Zheng et al. 2022, arXiv:2202.05607, section 4, equations 6 to 8.

    Args:
        temperature: initial lambda, which is logged as ``ent_coef``; not a softmax temperature.
        target_entropy: beta, in nats. None: -A for Box actions of A dimensions, as in the paper; a fifth of
            the largest entropy for discrete actions.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if temperature is not finite and more than 0, or target_entropy is not finite.
    """

    paper: ClassVar[str] = "Zheng et al. 2022, arXiv:2202.05607"
    temperature: float = 0.1
    target_entropy: float | None = None

    def __post_init__(self) -> None:
        check_positive("MaximumEntropy temperature", self.temperature)
        if self.target_entropy is not None:
            check_finite_number("MaximumEntropy target_entropy", self.target_entropy)

    def build(self, width: int, actions: BoxActions | DiscreteActions, features: int) -> "MaximumEntropyLoss":
        """Build the loss and its head; arguments as in `QRegularized.build`."""
        head: type[Any] = actions.select(continuous=SquashedGaussianHead, discrete=CategoricalHead)
        return MaximumEntropyLoss(head(width, actions), self.temperature, self.target_entropy)


class MaximumEntropyLoss(ObjectiveLoss):
    """Loss of `MaximumEntropy` with its action head and log lambda."""

    head: StochasticHead

    def __init__(self, head: StochasticHead, temperature: float, target_entropy: float | None):
        super().__init__()
        self.head = head
        self.target_entropy = head.default_target_entropy() if target_entropy is None else target_entropy
        self.log_temperature = nn.Parameter(torch.tensor(math.log(temperature)))

    def forward(self, y: Tensor, actions: Tensor, weight: Tensor) -> dict[str, Tensor]:
        error = masked_mean(self.head.error(y, actions), weight)
        entropy = masked_mean(self.head.entropy(y), weight)
        temperature = self.log_temperature.exp()
        dual = temperature * (entropy.detach() - self.target_entropy)
        parts = {"nll": error, "entropy": entropy, "ent_coef": temperature, "ent_coef_loss": dual}
        return {"loss": error - temperature.detach() * entropy + dual} | parts
