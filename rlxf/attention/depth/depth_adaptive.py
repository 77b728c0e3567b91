"""Depth-adaptive transformer: a classifier, trained on an oracle, predicts the exit of each token."""

from abc import abstractmethod
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
from rlxf.attention.technique import LayerPasses
from rlxf.utils.checks import check_choice, check_not_negative, check_positive

ClassifierName = Literal["sequence", "multinomial", "geometric"]
Oracle = Literal["likelihood", "correctness"]


@dataclass(frozen=True)
class DepthAdaptive(ExitDepth):
    r"""Equal loss weights for the outputs after each pass n = 1 ... N; a classifier q predicts the exit.

    - "sequence": ``q = softmax(W s + b)``, with s the mean of the tokens so far, before the first pass. In
      the paper s is the mean of an encoder's outputs, which causal agents do not have.
    - "multinomial": ``q_t = softmax(W h^1_t + b)``.
    - "geometric": ``q_t(n) = chi_n prod_(m<n) (1 - chi_m)`` with ``chi_n = sigma(w_n . h^n_t + b_n)`` and
      ``chi_N = 1``.

    q is trained by cross-entropy on an oracle: the first n that maximizes ``score_n - penalty n``. The score
    is the log-likelihood of the target, or 1 if the most likely choice is the target and 0 otherwise. It is
    summed over the sequence, or for a token t smoothed over its neighbors by
    ``sum_t' exp(-|t - t'|^2 / sigma) score_n(t')``. The gradient of q does not reach the rest of the
    transformer.

    While acting, a token exits after the most likely n; with "geometric", after the first n with
    ``chi_n > 1/2``.

    Source: Elbayad et al. 2020, arXiv:1910.10073, sections 3 and 4.

    Args:
        classifier: kind of the classifier q, as above.
        oracle: score of the oracle.
        penalty: lambda, minimum gain of each additional pass, in units of the score.
        sigma: smoothing width of the score.
        exit_coef: coefficient of the earlier outputs in the loss: 1 as in the paper; smaller values affect
            the last output less.

    Raises:
        TypeError: if penalty, sigma or exit_coef is not a number.
        ValueError: if classifier or oracle is unknown; if penalty or exit_coef is negative; if sigma is not
            positive; or if an option is not finite.
    """

    paper: ClassVar[str] = "Elbayad et al. 2020, arXiv:1910.10073"
    cost: ClassVar[str] = "L, with fewer passes while acting"
    classifier: ClassifierName = "multinomial"
    oracle: Oracle = "likelihood"
    penalty: float = 0.1
    sigma: float = 1.0
    exit_coef: float = 1.0

    def __post_init__(self) -> None:
        check_choice("DepthAdaptive classifier", self.classifier, get_args(ClassifierName))
        check_choice("DepthAdaptive oracle", self.oracle, get_args(Oracle))
        check_not_negative("DepthAdaptive penalty", self.penalty)
        check_positive("DepthAdaptive sigma", self.sigma)
        check_not_negative("DepthAdaptive exit_coef", self.exit_coef)

    @property
    def exits_token_by_token(self) -> bool:
        """True unless the exit depends on the mean of a sequence."""
        return self.classifier != "sequence"

    def build(self, width: int, passes: int) -> "DepthAdaptiveController":
        return CLASSIFIERS[self.classifier](self, width, passes)

    def loss_weights(self, passes: int) -> Tensor:
        """Return equal loss weights, the paper's "aligned training"."""
        return normalized_loss_weights(torch.ones(passes, dtype=torch.float64), self.exit_coef)

    def oracle_pass(self, targets: ExitTargets) -> Tensor:
        """Return the oracle's pass of each token, from 0: (B, T) int64.

        A likelihood that is not finite counts as the lowest or highest number whose sum over T is finite, so
        that it has no effect on other episodes.
        """
        score = targets.likelihood if self.oracle == "likelihood" else targets.correct.to(targets.likelihood)
        most = torch.finfo(score.dtype).max / score.shape[-1]
        score = score.masked_fill(~targets.filled, 0).nan_to_num(-most).clamp(-most, most)
        episode, position = targets.index.episode, targets.index.position
        weights = ((episode[:, :, None] == episode[:, None]) & targets.filled[:, :, None]).to(score)
        if self.classifier != "sequence":
            weights *= (-(position[:, :, None] - position[:, None]).square() / self.sigma).exp()
        count = torch.arange(1, score.shape[0] + 1, device=score.device)
        return (score[:, :, None] @ weights - self.penalty * count[:, None, None, None]).argmax(dim=0)[:, 0]


class DepthAdaptiveController(EarlyExitController):
    """Base of the three classifiers."""

    spec: DepthAdaptive

    def auxiliary_loss(self, initial: Tensor | None, states: Tensor, targets: ExitTargets) -> Tensor:
        """Return ``-log q(oracle)``, averaged over the tokens."""
        log_q = self.log_q(initial, states.detach())
        losses = F.nll_loss(log_q.movedim(-1, 1), self.spec.oracle_pass(targets), reduction="none")
        return targets.average(losses)

    @abstractmethod
    def log_q(self, initial: Tensor | None, states: Tensor) -> Tensor:
        """Return log q of each token, (B, T, N)."""


class MultinomialClassifier(DepthAdaptiveController):
    """Classifier "multinomial": ``net`` (C -> N) is W and b."""

    def __init__(self, spec: DepthAdaptive, width: int, passes: int):
        super().__init__(spec)
        self.net = nn.Linear(width, passes)

    def log_q(self, initial: Tensor | None, states: Tensor) -> Tensor:
        return self.net(states[0]).log_softmax(dim=-1)

    def exit_rule(self, x: Tensor, passes: LayerPasses) -> ExitRule:
        chosen: list[Tensor] = []

        def exits(pass_index: int, before: Tensor, after: Tensor, margin: ConfidenceGetter) -> Tensor:
            if pass_index == 0:
                chosen.append(self.net(after).argmax(dim=-1))
            return chosen[0] <= pass_index

        return exits


class SequenceClassifier(MultinomialClassifier):
    """Classifier "sequence": `MultinomialClassifier` for the mean of the episode's tokens so far."""

    def initial_features(self, x: Tensor, passes: LayerPasses) -> Tensor:
        """Return the mean over the episode's tokens so far."""
        episode = passes.index.episode
        same = (episode[:, :, None] == episode[:, None]) & passes.filled[:, None]
        visible = same.tril().to(x.dtype)
        mean = visible @ passes.attention_input(x) / visible.sum(dim=-1, keepdim=True).clamp(min=1)
        return passes.select_outputs(mean).detach()

    def log_q(self, initial: Tensor | None, states: Tensor) -> Tensor:
        assert initial is not None
        return self.net(initial).log_softmax(dim=-1)

    def exit_rule(self, x: Tensor, passes: LayerPasses) -> ExitRule:
        chosen = self.net(self.initial_features(x, passes)).argmax(dim=-1)
        return lambda number, before, after, margin: chosen <= number


class GeometricClassifier(DepthAdaptiveController):
    """Classifier "geometric": ``w`` (N - 1, C) and ``b`` (N - 1,) of each pass but the last."""

    def __init__(self, spec: DepthAdaptive, width: int, passes: int):
        super().__init__(spec)
        self.w = nn.Parameter(torch.randn(passes - 1, width) / width**0.5)
        self.b = nn.Parameter(torch.zeros(passes - 1))

    def log_q(self, initial: Tensor | None, states: Tensor) -> Tensor:
        logits = torch.einsum("nbtc,nc->btn", states[:-1], self.w) + self.b
        log_continue = F.logsigmoid(-logits).cumsum(dim=-1)
        before = F.pad(log_continue, (1, 0))
        return before + F.pad(F.logsigmoid(logits), (0, 1))

    def exit_rule(self, x: Tensor, passes: LayerPasses) -> ExitRule:
        return lambda number, before, after, margin: after @ self.w[number] + self.b[number] > 0


CLASSIFIERS: dict[ClassifierName, type[MultinomialClassifier | GeometricClassifier]] = {
    "sequence": SequenceClassifier,
    "multinomial": MultinomialClassifier,
    "geometric": GeometricClassifier,
}
