"""Leaving early: outputs are read behind every pass, and a token that is sure takes no more of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlxf.attention.depth.base import Depth, Judge, Passes, Processor, Taken
from rlxf.attention.index import EMPTY, Index
from rlxf.attention.technique import Choices

Lead = Callable[[], Tensor]
"""What a `Judge` says of the tokens that are decided on, (B, T), if it is asked."""

Rule = Callable[[int, Tensor, Tensor, Lead], Tensor]
"""Number of a pass, from 0, what tokens brought to it and what it made of them, (B, T, C) each: who leaves.

It is asked behind each pass but the last, in order, and gives (B, T) bool.
"""


@dataclass(frozen=True, eq=False)
class Verdict:
    """What is known of the outputs behind each of N passes, for what learns when to leave.

    Args:
        likelihood: log-likelihood of what was right, (N, B, T).
        right: whether the choice behind the pass was what was right, (N, B, T) bool.
        same: whether it was that behind the last pass, (N, B, T) bool.
        index: where the tokens stand, (B, T); what is empty is not learned from.
    """

    likelihood: Tensor
    right: Tensor
    same: Tensor
    index: Index

    @property
    def filled(self) -> Tensor:
        """Tokens to learn from, (B, T) bool."""
        return self.index.episode != EMPTY

    def average(self, x: Tensor) -> Tensor:
        """Mean of x (..., B, T) over the tokens to learn from."""
        filled = self.filled.expand_as(x)
        return (x * filled).sum() / filled.sum().clamp(min=1)


@dataclass(frozen=True, eq=False)
class Exits:
    """What may be read off a segment behind each of N passes.

    Args:
        outputs: (N, B, T, C).
        shares: what each counts in the loss, (N,); they add up to 1.
        states: what attention reads of the stream there, (N, B, T, C).
        lesson: what is added to the loss once it is known what came of the outputs; None for nothing.
    """

    outputs: Tensor
    shares: Tensor
    states: Tensor
    lesson: Callable[[Verdict], Tensor | None] | None = None


class ExitDepth(Depth):
    """Base of the depths whose tokens may leave behind every pass."""

    def check(self, choices: Choices) -> None:
        """See `Technique`: there has to be a pass to leave before."""
        super().check(choices)
        if choices.layers < 2:
            raise ValueError(f"{self} lets tokens leave before the last layer; there is one, use layers=2")

    @property
    def by_step(self) -> bool:
        """Whether a token alone, with what is remembered, says when it leaves."""
        return True

    @abstractmethod
    def build(self, width: int, passes: int) -> "Exiting":
        """See `Depth`."""

    @abstractmethod
    def shares(self, passes: int) -> Tensor:
        """What the outputs behind each pass count in the loss, (N,); they add up to 1."""


def shared(weights: Tensor, exit_coef: float) -> Tensor:
    """Weights (N,) as shares that add up to 1, where all but the last count ``exit_coef`` times."""
    weights = torch.cat([exit_coef * weights[:-1], weights[-1:]])
    return weights / weights.sum()


class Exiting(Processor, ABC):
    """Takes tokens through all passes to learn, and to act as far as each of them needs."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = Taken()

    def all_outputs(self, x: Tensor, passes: Passes) -> list[Tensor]:
        """The stream behind each pass, of those that ask. All tokens take all passes."""
        found = []
        for number in range(passes.count):
            x = passes.run(number, passes.enter(number, x))
            found.append(x if number == passes.count - 1 else passes.asking(x))
        return found

    @torch.no_grad()
    def early(self, x: Tensor, passes: Passes, judge: Judge | None) -> Tensor:
        """See `Processor`: the stream from where each left. What left is copied to later passes."""
        rule, filled, y = self.rule(x, passes), passes.asking(passes.filled), passes.asking(x)
        going, taken = filled, torch.zeros(filled.shape, device=x.device)
        for number in range(passes.count):
            entered, last = passes.enter(number, x), number == passes.count - 1
            if not going.any():
                passes.leave_out(number, entered)
                continue
            taken += going
            after = passes.run(number, entered)
            before, y = y, torch.where(going[..., None], after if last else passes.asking(after), y)
            if not last:
                x = after.clone()
                passes.asking(x).copy_(y)
                going = going & ~rule(number, passes.read(before), passes.read(y), partial(_asked, judge, y))
        self._taken.add(taken[filled].sum(), filled.sum())
        return y

    def acting_depth(self) -> Tensor | None:
        """See `Processor`."""
        return self._taken.mean()

    @abstractmethod
    def rule(self, x: Tensor, passes: Passes) -> Rule:
        """Who leaves when; the arguments are those of `early`."""

    def opening(self, x: Tensor, passes: Passes) -> Tensor | None:
        """What `lesson` wants to know of the stream before the first pass, (B, Tq, C); None for nothing."""
        return None

    @abstractmethod
    def lesson(self, opening: Tensor | None, states: Tensor, verdict: Verdict) -> Tensor | None:
        """What is added to the loss, a scalar, to learn when to leave; None if nothing is learned.

        Args:
            opening: of `opening`.
            states: what attention reads of the stream behind each pass, (N, B, T, C).
            verdict: what came of it.
        """


def _asked(judge: Judge | None, stream: Tensor) -> Tensor:
    assert judge is not None, "nothing is read off the outputs"
    return judge(stream)
