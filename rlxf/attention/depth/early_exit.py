"""Early exits: outputs after every pass, and tokens that skip the remaining passes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlxf.attention.depth.base import ConfidenceFn, Depth, DepthController, DepthCounter, LayerPasses
from rlxf.attention.technique import SpecView
from rlxf.attention.token_index import EMPTY, TokenIndex

ConfidenceGetter = Callable[[], Tensor]
"""Function that returns the confidence of the current tokens by a `ConfidenceFn`, (B, T); called if
needed.
"""

ExitRule = Callable[[int, Tensor, Tensor, ConfidenceGetter], Tensor]
"""Exit rule: a function that returns which tokens exit after a pass, (B, T) bool.

Its arguments are the number of the pass, from 0, its inputs and outputs, (B, T, C) each, and a
`ConfidenceGetter`. It is called after each pass but the last, in order.
"""


@dataclass(frozen=True, eq=False)
class ExitTargets:
    """Targets of the exit classifiers, for the outputs after each of N passes.

    Args:
        likelihood: log-likelihood of the target, (N, B, T).
        correct: whether the choice after the pass is the target, (N, B, T) bool.
        agrees_with_last: whether it equals the choice after the last pass, (N, B, T) bool.
        index: positions and episodes of the tokens, (B, T); empty slots are excluded.
    """

    likelihood: Tensor
    correct: Tensor
    agrees_with_last: Tensor
    index: TokenIndex

    @property
    def filled(self) -> Tensor:
        """Mask of tokens to learn from, (B, T) bool."""
        return self.index.episode != EMPTY

    def average(self, x: Tensor) -> Tensor:
        """Return the mean of x (..., B, T) over the tokens to learn from."""
        filled = self.filled.expand_as(x)
        return (x * filled).sum() / filled.sum().clamp(min=1)


@dataclass(frozen=True, eq=False)
class ExitOutputs:
    """Outputs of a segment after each of N passes.

    Args:
        outputs: (N, B, T, C).
        loss_weights: loss weight of each output, (N,); they sum to 1.
        states: inputs of attention after each pass, (N, B, T, C).
        auxiliary_loss: auxiliary loss of the exit classifier, given its targets; None for none.
    """

    outputs: Tensor
    loss_weights: Tensor
    states: Tensor
    auxiliary_loss: Callable[[ExitTargets], Tensor | None] | None = None


class ExitDepth(Depth):
    """Base of the depths with an early exit after every pass."""

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless there are at least two layers."""
        super().check(choices)
        if choices.layers < 2:
            raise ValueError(
                f"{self} lets tokens exit before the last layer and requires at least 2 layers, got layers=1"
            )

    def check_no_early_exit(self, use: str) -> None:
        raise ValueError(
            f"{use} needs outputs of one depth, but {self} exits early; use a core without early exits"
        )

    @property
    def exits_token_by_token(self) -> bool:
        """True if the exit of a token depends only on the token itself and on memory."""
        return True

    @abstractmethod
    def build(self, width: int, passes: int) -> "EarlyExitController":
        """Return the module."""

    @abstractmethod
    def loss_weights(self, passes: int) -> Tensor:
        """Return the loss weights of the outputs after each pass, (N,); they sum to 1."""


def normalized_loss_weights(weights: Tensor, exit_coef: float) -> Tensor:
    """Normalize weights (N,) to sum to 1, after scaling all but the last by ``exit_coef``."""
    weights = torch.cat([exit_coef * weights[:-1], weights[-1:]])
    return weights / weights.sum()


class EarlyExitController(DepthController, ABC):
    """Controller with early exits: all passes while learning, as many as needed while acting."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = DepthCounter()

    def all_outputs(self, x: Tensor, passes: LayerPasses) -> list[Tensor]:
        """Return the residual stream after each pass, for the selected tokens. All tokens take all passes."""
        outputs = []
        for number in range(passes.count):
            x = passes.run(number, passes.start_pass(number, x))
            outputs.append(x if number == passes.count - 1 else passes.select_outputs(x))
        return outputs

    @torch.no_grad()
    def early_exit(self, x: Tensor, passes: LayerPasses, judge: ConfidenceFn | None) -> Tensor:
        """Return the residual stream at the exit of each token; it is copied to later passes."""
        rule, filled, y = (
            self.exit_rule(x, passes),
            passes.select_outputs(passes.filled),
            passes.select_outputs(x),
        )
        running, passes_taken = filled, torch.zeros(filled.shape, device=x.device)
        for number in range(passes.count):
            inputs, last = passes.start_pass(number, x), number == passes.count - 1
            if not running.any():
                passes.skip(number, inputs)
                continue
            passes_taken += running
            after = passes.run(number, inputs)
            before, y = y, torch.where(running[..., None], after if last else passes.select_outputs(after), y)
            if not last:
                x = after.clone()
                passes.select_outputs(x).copy_(y)
                running = running & ~rule(
                    number,
                    passes.attention_input(before),
                    passes.attention_input(y),
                    partial(_confidence, judge, y),
                )
        self._taken.add(passes_taken[filled].sum(), filled.sum())
        return y

    def mean_acting_depth(self) -> Tensor | None:
        return self._taken.mean()

    @abstractmethod
    def exit_rule(self, x: Tensor, passes: LayerPasses) -> ExitRule:
        """Return the exit rule; arguments as in `early`."""

    def initial_features(self, x: Tensor, passes: LayerPasses) -> Tensor | None:
        """Return features of the stream before the first pass for `lesson`, (B, Tq, C), or None."""
        return None

    @abstractmethod
    def auxiliary_loss(self, opening: Tensor | None, states: Tensor, verdict: ExitTargets) -> Tensor | None:
        """Return the auxiliary loss of the exit classifier, a scalar; None if there is none.

        Args:
            opening: result of `opening`.
            states: inputs of attention after each pass, (N, B, T, C).
            verdict: targets of the classifier.
        """


def _confidence(judge: ConfidenceFn | None, stream: Tensor) -> Tensor:
    """Return the confidence of a residual stream."""
    assert judge is not None, "no output heads"
    return judge(stream)
