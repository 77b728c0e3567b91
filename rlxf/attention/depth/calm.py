"""CALM: confident tokens exit early while acting."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.depth.base import (
    ConfidenceGetter,
    EarlyExitController,
    ExitDepth,
    ExitRule,
    ExitTargets,
    normalized_loss_weights,
)
from rlxf.attention.technique import LayerPasses, SpecView
from rlxf.utils.checks import check_between, check_choice, check_not_negative

Confidence = Literal["softmax", "state", "classifier"]


@dataclass(frozen=True)
class CALM(ExitDepth):
    r"""Early exit after the first pass n = 1 ... N whose confidence is at least the threshold, while acting.

    - "softmax": the difference of the two largest probabilities of the choices predicted from the output:
      `probability_margin`;
    - "state": ``cos(h^(n-1), h^n)``, from the second pass on, so there must be three passes;
    - "classifier": ``sigma(w . h^n + b)``, which is trained to predict whether the choice after pass n equals
      the choice after the last pass. Its gradient does not reach the rest of the transformer.

    The loss includes the outputs after each pass, with weight ``n / (1 + ... + N)``. The state of an exited
    token is copied to later passes, where other tokens attend to it. While learning, and in rollouts of PPO,
    all tokens take all passes.

    Source: Schuster et al. 2022, arXiv:2207.07061, section 3.

    Args:
        confidence: confidence measure. The classifier supports all action spaces, and two layers.
        threshold: from 0 to 1; with 1, which is only reached by rounding, tokens almost never exit early.
        exit_coef: coefficient of the earlier outputs in the loss: 1 as in the paper; smaller values affect
            the last output less.

    Raises:
        TypeError: if threshold or exit_coef is not a number.
        ValueError: if confidence is unknown, threshold is not from 0 to 1, or exit_coef is negative or not
            finite.
    """

    paper: ClassVar[str] = "Schuster et al. 2022, arXiv:2207.07061"
    cost: ClassVar[str] = "L, with fewer passes while acting"
    confidence: Confidence = "classifier"
    threshold: float = 1.0
    exit_coef: float = 1.0

    def __post_init__(self) -> None:
        check_choice("CALM confidence", self.confidence, get_args(Confidence))
        check_between("CALM threshold", self.threshold, 0, 1)
        check_not_negative("CALM exit_coef", self.exit_coef)

    def check(self, choices: SpecView) -> None:
        super().check(choices)
        if self.confidence == "state" and choices.layers < 3:
            raise ValueError(
                f"{self} compares the outputs of two layers and requires at least 3 layers, got layers="
                f"{choices.layers}; set layers=3 or choose another confidence"
            )

    def check_targets(self, targets: object, discrete: bool) -> None:
        if self.confidence == "softmax" and not discrete:
            raise ValueError(
                f"{self} compares the probabilities of discrete actions, but the action space is {targets}; "
                f"use confidence='state' or 'classifier'"
            )

    def build(self, width: int, passes: int) -> "CALMController":
        return CONFIDENCE_MEASURES[self.confidence](self, width)

    def loss_weights(self, passes: int) -> Tensor:
        return normalized_loss_weights(torch.arange(1, passes + 1, dtype=torch.float64), self.exit_coef)


class CALMController(EarlyExitController):
    """Base of the three confidence measures; ``threshold`` is that of the spec until calibration."""

    threshold: Tensor

    def __init__(self, spec: CALM, width: int):
        super().__init__(spec)
        self.register_buffer("threshold", torch.tensor(float(spec.threshold)))
        self.spec_threshold = spec.threshold

    def calibratable_exit(self) -> "CALMController":
        return self

    def exit_rule(self, x: Tensor, passes: LayerPasses) -> ExitRule:
        return lambda *arguments: self.confidence(*arguments) >= self.threshold

    @abstractmethod
    def confidence(self, pass_index: int, before: Tensor, after: Tensor, margin: ConfidenceGetter) -> Tensor:
        """Return the confidence of each token after a pass, (B, T); arguments as in `ExitRule`."""


class SoftmaxResponse(CALMController):
    """Confidence measure "softmax": the margin between the two most likely choices."""

    def confidence(self, pass_index: int, before: Tensor, after: Tensor, margin: ConfidenceGetter) -> Tensor:
        return margin()


class StateSaturation(CALMController):
    """Confidence measure "state": the cosine similarity of the states before and after a pass.

    It is -1 after the first pass.
    """

    def confidence(self, pass_index: int, before: Tensor, after: Tensor, margin: ConfidenceGetter) -> Tensor:
        if pass_index == 0:
            return torch.full(after.shape[:-1], -1.0, dtype=after.dtype, device=after.device)
        return F.cosine_similarity(before, after, dim=-1)


class LearnedConfidence(CALMController):
    """Confidence measure "classifier": ``net`` (C -> 1) is w and b, shared by all passes."""

    def __init__(self, spec: CALM, width: int):
        super().__init__(spec, width)
        self.net = nn.Linear(width, 1)

    def confidence(self, pass_index: int, before: Tensor, after: Tensor, margin: ConfidenceGetter) -> Tensor:
        return self.net(after)[..., 0].sigmoid()

    def auxiliary_loss(self, initial: Tensor | None, states: Tensor, targets: ExitTargets) -> Tensor:
        """Return the cross-entropy of the classifier, averaged over tokens and all passes but the last."""
        logits = self.net(states[:-1].detach())[..., 0]
        losses = F.binary_cross_entropy_with_logits(
            logits, targets.agrees_with_last[:-1].to(logits), reduction="none"
        )
        return targets.average(losses)


def probability_margin(probabilities: Sequence[Tensor]) -> Tensor:
    """Return the probability of the most likely joint choice minus that of the second most likely.

    It is ``prod_i p_i (1 - max_i q_i / p_i)``, with p_i and q_i the largest and second largest probability of
    choice i. The second best joint choice differs from the best in the one choice with the largest ratio.

    Args:
        probabilities: (..., A) for each choice.

    Returns:
        (...).
    """
    best, ratios = [], []
    for choice in probabilities:
        first, *second = choice.topk(min(2, choice.shape[-1]), dim=-1).values.unbind(-1)
        best.append(first)
        ratios.append(second[0] / first if second else torch.zeros_like(first))
    return torch.stack(best).prod(dim=0) * (1 - torch.stack(ratios).amax(dim=0))


CONFIDENCE_MEASURES: dict[Confidence, type[CALMController]] = {
    "softmax": SoftmaxResponse,
    "state": StateSaturation,
    "classifier": LearnedConfidence,
}
