"""Depth-adaptive transformer: a classifier says how deep a token has to go, and learns it from an oracle."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.checks import check_finite_number, check_not_negative, check_word
from rlxf.attention.depth.base import Passes
from rlxf.attention.depth.exits import ExitDepth, Exiting, Lead, Rule, Verdict, shared

By = Literal["sequence", "multinomial", "geometric"]
Oracle = Literal["likelihood", "correctness"]


@dataclass(frozen=True)
class DepthAdaptive(ExitDepth):
    r"""Outputs behind each pass n = 1 ... N are in the loss alike; a classifier q says which one to act by.

    - "sequence": ``q = softmax(W s + b)``, with s the mean of the tokens so far, before the first pass. In
      the paper it is that of an encoder's outputs, of which causal agents have none.
    - "multinomial": ``q_t = softmax(W h^1_t + b)``.
    - "geometric": ``q_t(n) = chi_n prod_(m<n) (1 - chi_m)`` with ``chi_n = sigma(w_n . h^n_t + b_n)`` and
      ``chi_N = 1``.

    It learns by cross-entropy from an oracle: the n that makes the most of ``score_n - penalty n``, the first
    of them. The score is the log-likelihood of what was right, or 1 where the likeliest choice was right and
    0 elsewhere: summed over the sequence, or for a token t smoothed over its neighbours by
    ``sum_t' exp(-|t - t'|^2 / sigma) score_n(t')``. No gradient of it reaches the rest of the transformer.

    Acting, a token leaves behind the most likely n; by "geometric", behind the first n with ``chi_n > 1/2``.

    Source: Elbayad et al. 2020, arXiv:1910.10073, sections 3 and 4.

    Args:
        by: the classifier.
        oracle: what it learns from.
        penalty: lambda, what one more pass has to bring, in units of the score.
        sigma: how far the score of a token is smoothed.
        exit_coef: how much outputs before the last count in the loss: 1 as in the paper; less disturbs the
            last one less.

    Raises:
        ValueError: if by or oracle is unknown, penalty or exit_coef is negative, sigma not positive, or one
            not finite.
        TypeError: if penalty, sigma or exit_coef is no number.
    """

    paper: ClassVar[str] = "Elbayad et al. 2020, arXiv:1910.10073"
    cost: ClassVar[str] = "L, for fewer passes while acting"
    by: By = "multinomial"
    oracle: Oracle = "likelihood"
    penalty: float = 0.1
    sigma: float = 1.0
    exit_coef: float = 1.0

    def __post_init__(self) -> None:
        check_word("DepthAdaptive by", self.by, get_args(By))
        check_word("DepthAdaptive oracle", self.oracle, get_args(Oracle))
        check_not_negative("DepthAdaptive penalty", self.penalty)
        check_finite_number("DepthAdaptive sigma", self.sigma)
        check_not_negative("DepthAdaptive exit_coef", self.exit_coef)
        if self.sigma <= 0:
            raise ValueError(f"DepthAdaptive sigma must be more than 0, got {self.sigma}")

    @property
    def by_step(self) -> bool:
        """See `ExitDepth`: a sequence is no token."""
        return self.by != "sequence"

    def build(self, width: int, passes: int) -> "Adaptive":
        """See `Depth`."""
        return CLASSIFIERS[self.by](self, width, passes)

    def shares(self, passes: int) -> Tensor:
        """See `ExitDepth`: all alike, the paper's "aligned training"."""
        return shared(torch.ones(passes, dtype=torch.float64), self.exit_coef)

    def targets(self, verdict: Verdict) -> Tensor:
        """The oracle's pass, from 0, of each token: (B, T) int64."""
        score = verdict.likelihood if self.oracle == "likelihood" else verdict.right.to(verdict.likelihood)
        episode, position = verdict.index.episode, verdict.index.position
        near = ((episode[:, :, None] == episode[:, None]) & verdict.filled[:, :, None]).to(score)
        if self.by != "sequence":
            near *= (-(position[:, :, None] - position[:, None]).square() / self.sigma).exp()
        count = torch.arange(1, score.shape[0] + 1, device=score.device)
        return (score[:, :, None] @ near - self.penalty * count[:, None, None, None]).argmax(dim=0)[:, 0]


class Adaptive(Exiting):
    """What the three classifiers have in common."""

    def __init__(self, spec: DepthAdaptive):
        super().__init__()
        self.spec = spec

    def lesson(self, opening: Tensor | None, states: Tensor, verdict: Verdict) -> Tensor:
        """See `Exiting`: ``-log q(oracle)``, the mean over the tokens."""
        log_q = self.log_q(opening, states.detach())
        missed = F.nll_loss(log_q.movedim(-1, 1), self.spec.targets(verdict), reduction="none")
        return verdict.average(missed)

    @abstractmethod
    def log_q(self, opening: Tensor | None, states: Tensor) -> Tensor:
        """log q of each token, (B, T, N)."""


class Multinomial(Adaptive):
    """``net`` (C -> N) is W and b."""

    def __init__(self, spec: DepthAdaptive, width: int, passes: int):
        super().__init__(spec)
        self.net = nn.Linear(width, passes)

    def log_q(self, opening: Tensor | None, states: Tensor) -> Tensor:
        """See `Adaptive`."""
        return self.net(states[0]).log_softmax(dim=-1)

    def rule(self, x: Tensor, passes: Passes) -> Rule:
        """See `Exiting`."""
        chosen: list[Tensor] = []

        def leaves(number: int, before: Tensor, after: Tensor, lead: Lead) -> Tensor:
            if number == 0:
                chosen.append(self.net(after).argmax(dim=-1))
            return chosen[0] <= number

        return leaves


class OfSequence(Multinomial):
    """As `Multinomial`, for the mean of the episode's tokens so far."""

    def opening(self, x: Tensor, passes: Passes) -> Tensor:
        """See `Exiting`: the mean over the tokens so far. An episode is one sequence."""
        episode = passes.index.episode
        same = (episode[:, :, None] == episode[:, None]) & passes.filled[:, None]
        among = same.tril().to(x.dtype)
        mean = among @ passes.read(x) / among.sum(dim=-1, keepdim=True).clamp(min=1)
        return passes.asking(mean).detach()

    def log_q(self, opening: Tensor | None, states: Tensor) -> Tensor:
        """See `Adaptive`."""
        assert opening is not None
        return self.net(opening).log_softmax(dim=-1)

    def rule(self, x: Tensor, passes: Passes) -> Rule:
        """See `Exiting`."""
        chosen = self.net(self.opening(x, passes)).argmax(dim=-1)
        return lambda number, before, after, lead: chosen <= number


class Geometric(Adaptive):
    """``w`` (N - 1, C) and ``b`` (N - 1,) are those of each pass but the last."""

    def __init__(self, spec: DepthAdaptive, width: int, passes: int):
        super().__init__(spec)
        self.w = nn.Parameter(torch.randn(passes - 1, width) / width**0.5)
        self.b = nn.Parameter(torch.zeros(passes - 1))

    def log_q(self, opening: Tensor | None, states: Tensor) -> Tensor:
        """See `Adaptive`."""
        logits = torch.einsum("nbtc,nc->btn", states[:-1], self.w) + self.b
        goes_on = F.logsigmoid(-logits).cumsum(dim=-1)
        before = F.pad(goes_on, (1, 0))
        return before + F.pad(F.logsigmoid(logits), (0, 1))

    def rule(self, x: Tensor, passes: Passes) -> Rule:
        """See `Exiting`."""
        return lambda number, before, after, lead: after @ self.w[number] + self.b[number] > 0


CLASSIFIERS: dict[By, type[Multinomial | Geometric]] = {
    "sequence": OfSequence,
    "multinomial": Multinomial,
    "geometric": Geometric,
}
