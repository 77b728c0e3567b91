"""CALM: a token that is confident enough leaves early, while acting."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.checks import check_finite_number, check_not_negative, check_word
from rlxf.attention.depth.base import Passes
from rlxf.attention.depth.exits import ExitDepth, Exiting, Lead, Rule, Verdict, shared
from rlxf.attention.technique import Choices

Confidence = Literal["softmax", "state", "classifier"]


@dataclass(frozen=True)
class CALM(ExitDepth):
    r"""Acting, a token leaves behind the first pass n = 1 ... N whose confidence is at least the threshold.

    - "softmax": the largest probability less the second largest, of the choices read off the output: `lead`;
    - "state": ``cos(h^(n-1), h^n)``, from the second pass on, so there must be three;
    - "classifier": ``sigma(w . h^n + b)``, which learns whether the choice behind pass n is that behind the
      last. No gradient of it reaches the rest of the transformer.

    Outputs behind each pass are in the loss, with ``n / (1 + ... + N)``. What left is copied to later passes,
    where other tokens see it. While learning, and while PPO collects, all tokens take all passes.

    Source: Schuster et al. 2022, arXiv:2207.07061, section 3.

    Args:
        confidence: which of the three. The classifier suits any actions, and two layers.
        threshold: from 0 to 1; at 1, which none reaches but by rounding, hardly anyone leaves early.
        exit_coef: how much outputs before the last count in the loss: 1 as in the paper; less disturbs the
            last one less.

    Raises:
        ValueError: if confidence is unknown, threshold not from 0 to 1, or exit_coef negative or not finite.
        TypeError: if threshold or exit_coef is no number.
    """

    paper: ClassVar[str] = "Schuster et al. 2022, arXiv:2207.07061"
    cost: ClassVar[str] = "L, for fewer passes while acting"
    confidence: Confidence = "classifier"
    threshold: float = 1.0
    exit_coef: float = 1.0

    def __post_init__(self) -> None:
        check_word("CALM confidence", self.confidence, get_args(Confidence))
        check_finite_number("CALM threshold", self.threshold)
        check_not_negative("CALM exit_coef", self.exit_coef)
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"CALM threshold must be from 0 to 1, got {self.threshold}")

    def check(self, choices: Choices) -> None:
        """See `ExitDepth`."""
        super().check(choices)
        if self.confidence == "state" and choices.layers < 3:
            raise ValueError(
                f"{self} compares states from the second layer on, so with {choices.layers} nobody leaves "
                f"before the last; use layers=3, or another confidence"
            )

    def build(self, width: int, passes: int) -> "Confident":
        """See `Depth`."""
        return MEASURES[self.confidence](self, width)

    def shares(self, passes: int) -> Tensor:
        """See `ExitDepth`."""
        return shared(torch.arange(1, passes + 1, dtype=torch.float64), self.exit_coef)


class Confident(Exiting):
    """What the three measures have in common; ``threshold`` is that of the spec until it is calibrated."""

    threshold: Tensor

    def __init__(self, spec: CALM, width: int):
        super().__init__()
        self.register_buffer("threshold", torch.tensor(float(spec.threshold)))

    def rule(self, x: Tensor, passes: Passes) -> Rule:
        """See `Exiting`."""
        return lambda *behind: self.confidence(*behind) >= self.threshold

    @abstractmethod
    def confidence(self, number: int, before: Tensor, after: Tensor, lead: Lead) -> Tensor:
        """Of each token behind a pass, from 0 to 1: (B, T). The arguments are those of a `Rule`."""

    def lesson(self, opening: Tensor | None, states: Tensor, verdict: Verdict) -> Tensor | None:
        """See `Exiting`: nothing."""
        return None


class SoftmaxResponse(Confident):
    """How far the likeliest choice is ahead."""

    def confidence(self, number: int, before: Tensor, after: Tensor, lead: Lead) -> Tensor:
        """See `Confident`."""
        return lead()


class StateSaturation(Confident):
    """How little a pass has turned the state."""

    def confidence(self, number: int, before: Tensor, after: Tensor, lead: Lead) -> Tensor:
        """See `Confident`."""
        if number == 0:
            return torch.full(after.shape[:-1], -1.0, dtype=after.dtype, device=after.device)
        return F.cosine_similarity(before, after, dim=-1)


class LearnedConfidence(Confident):
    """``net`` (C -> 1) is w and b, the same behind all passes."""

    def __init__(self, spec: CALM, width: int):
        super().__init__(spec, width)
        self.net = nn.Linear(width, 1)

    def confidence(self, number: int, before: Tensor, after: Tensor, lead: Lead) -> Tensor:
        """See `Confident`."""
        return self.net(after)[..., 0].sigmoid()

    def lesson(self, opening: Tensor | None, states: Tensor, verdict: Verdict) -> Tensor:
        """See `Exiting`: cross-entropy behind each pass but the last, the mean over passes and tokens."""
        logits = self.net(states[:-1].detach())[..., 0]
        missed = F.binary_cross_entropy_with_logits(logits, verdict.same[:-1].to(logits), reduction="none")
        return verdict.average(missed)


def lead(probabilities: Sequence[Tensor]) -> Tensor:
    """Probability of the likeliest joint choice less that of the next: a (..., A) for each choice -> (...).

    ``prod_i p_i (1 - max_i q_i / p_i)``, with p_i and q_i the largest and second largest of choice i: the
    next best differs from the best in the one choice in which that costs least.
    """
    best, nearest = [], []
    for each in probabilities:
        first, *second = each.topk(min(2, each.shape[-1]), dim=-1).values.unbind(-1)
        best.append(first)
        nearest.append(second[0] / first if second else torch.zeros_like(first))
    return torch.stack(best).prod(dim=0) * (1 - torch.stack(nearest).amax(dim=0))


MEASURES: dict[Confidence, type[Confident]] = {
    "softmax": SoftmaxResponse,
    "state": StateSaturation,
    "classifier": LearnedConfidence,
}
