"""Early exits: outputs after every pass, and tokens that skip the remaining passes."""

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
"""Function that returns the confidence of the current tokens by a `Judge`, (B, T); called if needed."""

Rule = Callable[[int, Tensor, Tensor, Lead], Tensor]
"""Exit rule: a function that returns which tokens exit after a pass, (B, T) bool.

Its arguments are the number of the pass, from 0, its inputs and outputs, (B, T, C) each, and a `Lead`. It is
called after each pass but the last, in order.
"""


@dataclass(frozen=True, eq=False)
class Verdict:
    """Targets of the exit classifiers, for the outputs after each of N passes.

    Args:
        likelihood: log-likelihood of the target, (N, B, T).
        right: whether the choice after the pass is the target, (N, B, T) bool.
        same: whether it equals the choice after the last pass, (N, B, T) bool.
        index: positions and episodes of the tokens, (B, T); empty slots are excluded.
    """

    likelihood: Tensor
    right: Tensor
    same: Tensor
    index: Index

    @property
    def filled(self) -> Tensor:
        """Mask of tokens to learn from, (B, T) bool."""
        return self.index.episode != EMPTY

    def average(self, x: Tensor) -> Tensor:
        """Return the mean of x (..., B, T) over the tokens to learn from."""
        filled = self.filled.expand_as(x)
        return (x * filled).sum() / filled.sum().clamp(min=1)


@dataclass(frozen=True, eq=False)
class Exits:
    """Outputs of a segment after each of N passes.

    Args:
        outputs: (N, B, T, C).
        shares: loss weight of each output, (N,); they sum to 1.
        states: inputs of attention after each pass, (N, B, T, C).
        lesson: auxiliary loss of the exit classifier, given its targets; None for none.
    """

    outputs: Tensor
    shares: Tensor
    states: Tensor
    lesson: Callable[[Verdict], Tensor | None] | None = None


class ExitDepth(Depth):
    """Base of the depths with an early exit after every pass."""

    def check(self, choices: Choices) -> None:
        """Raise ValueError unless there are at least two layers."""
        super().check(choices)
        if choices.layers < 2:
            raise ValueError(
                f"{self} lets tokens exit before the last layer and requires at least 2 layers, got layers=1"
            )

    @property
    def by_step(self) -> bool:
        """True if the exit of a token depends only on the token itself and on memory."""
        return True

    @abstractmethod
    def build(self, width: int, passes: int) -> "Exiting":
        """Return the module."""

    @abstractmethod
    def shares(self, passes: int) -> Tensor:
        """Return the loss weights of the outputs after each pass, (N,); they sum to 1."""


def shared(weights: Tensor, exit_coef: float) -> Tensor:
    """Normalize weights (N,) to sum to 1, after scaling all but the last by ``exit_coef``."""
    weights = torch.cat([exit_coef * weights[:-1], weights[-1:]])
    return weights / weights.sum()


class Exiting(Processor, ABC):
    """Controller with early exits: all passes while learning, as many as needed while acting."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = Taken()

    def all_outputs(self, x: Tensor, passes: Passes) -> list[Tensor]:
        """Return the residual stream after each pass, for the selected tokens. All tokens take all passes."""
        outputs = []
        for number in range(passes.count):
            x = passes.run(number, passes.enter(number, x))
            outputs.append(x if number == passes.count - 1 else passes.asking(x))
        return outputs

    @torch.no_grad()
    def early(self, x: Tensor, passes: Passes, judge: Judge | None) -> Tensor:
        """Return the residual stream at the exit of each token; it is copied to later passes."""
        rule, filled, y = self.rule(x, passes), passes.asking(passes.filled), passes.asking(x)
        running, passes_taken = filled, torch.zeros(filled.shape, device=x.device)
        for number in range(passes.count):
            inputs, last = passes.enter(number, x), number == passes.count - 1
            if not running.any():
                passes.leave_out(number, inputs)
                continue
            passes_taken += running
            after = passes.run(number, inputs)
            before, y = y, torch.where(running[..., None], after if last else passes.asking(after), y)
            if not last:
                x = after.clone()
                passes.asking(x).copy_(y)
                running = running & ~rule(
                    number, passes.read(before), passes.read(y), partial(_confidence, judge, y)
                )
        self._taken.add(passes_taken[filled].sum(), filled.sum())
        return y

    def acting_depth(self) -> Tensor | None:
        return self._taken.mean()

    @abstractmethod
    def rule(self, x: Tensor, passes: Passes) -> Rule:
        """Return the exit rule; arguments as in `early`."""

    def opening(self, x: Tensor, passes: Passes) -> Tensor | None:
        """Return features of the stream before the first pass for `lesson`, (B, Tq, C), or None."""
        return None

    @abstractmethod
    def lesson(self, opening: Tensor | None, states: Tensor, verdict: Verdict) -> Tensor | None:
        """Return the auxiliary loss of the exit classifier, a scalar; None if there is none.

        Args:
            opening: result of `opening`.
            states: inputs of attention after each pass, (N, B, T, C).
            verdict: targets of the classifier.
        """


def _confidence(judge: Judge | None, stream: Tensor) -> Tensor:
    """Return the confidence of a residual stream."""
    assert judge is not None, "no output heads"
    return judge(stream)
