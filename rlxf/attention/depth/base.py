"""Base classes of the depth techniques: the order of layers, and early exits."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from rlxf.attention.technique import LayerPasses, SpecView, Technique
from rlxf.attention.token_index import EMPTY, TokenIndex

ConfidenceFn = Callable[[Tensor], Tensor]
"""Confidence function: outputs (..., C) -> difference of the two largest probabilities, (...).

In a `DepthController`, its arguments are residual streams (..., C) instead of outputs of the transformer.
"""


StreamFn = Callable[[Tensor], Tensor]
"""Function from residual streams to outputs of the transformer, (..., C)."""


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
        """Return the mean of x (..., B, T) over the tokens to learn from; others may have any value."""
        filled = self.filled.expand_as(x)
        return torch.where(filled, x, 0).sum() / filled.sum().clamp(min=1)


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


class CalibratableExit(Protocol):
    """Exit rule that compares a confidence with a threshold, which calibration may set."""

    threshold: Tensor
    """Minimum confidence at which a token exits, a scalar."""
    spec_threshold: float
    """Threshold of the spec, which holds until calibration."""

    def confidence(
        self, pass_index: int, before: Tensor, after: Tensor, margin: Callable[[], Tensor]
    ) -> Tensor:
        """Return the confidence of each token after a pass, (B, T).

        Args:
            pass_index: number of the pass, from 0.
            before: states before the pass, (B, T, C).
            after: states after the pass, (B, T, C).
            margin: function that applies the `ConfidenceFn` to the current outputs.
        """
        ...


class DepthCounter:
    """Mean number of passes of acting tokens since the last call of `pop_mean`."""

    def __init__(self) -> None:
        self._passes: Tensor | float = 0.0
        self._tokens: Tensor | int = 0

    def add(self, passes: Tensor, tokens: Tensor) -> None:
        """Add numbers of passes and of tokens, scalars."""
        self._passes, self._tokens = self._passes + passes, self._tokens + tokens

    def pop_mean(self) -> Tensor | None:
        """Return the mean number of passes per token, and reset it; None if there were no tokens."""
        passes, tokens = self._passes, self._tokens
        self._passes, self._tokens = 0.0, 0
        return torch.as_tensor(passes / tokens) if tokens else None


class DepthController(nn.Module):
    """Controller of the passes, i.e. applications of a layer. By default each token takes each pass once."""

    def forward(self, x: Tensor, passes: LayerPasses) -> Tensor:
        """Process tokens x (B, T, C) and return the selected outputs, (B, Tq, C)."""
        return passes.run_all(x)

    def exits(self, x: Tensor, passes: LayerPasses, output: StreamFn) -> ExitOutputs:
        """Return the outputs after each pass that tokens may exit from; by default after the last one only.

        Args:
            x: residual stream before the first pass, (B, T, C).
            passes: passes to run.
            output: function that computes the output of the transformer from the stream at an exit.
        """
        stream = self(x, passes)
        y = output(stream)[None]
        return ExitOutputs(y, y.new_ones(1), passes.attention_input(stream)[None])

    @property
    def has_early_exit(self) -> bool:
        """True if `early_exit` may differ from a pass through all layers."""
        return type(self).early_exit is not DepthController.early_exit

    def early_exit(self, x: Tensor, passes: LayerPasses, confidence_fn: ConfidenceFn | None) -> Tensor:
        """Compute `forward` for acting tokens, with early exits; by default without them.

        Args:
            x: residual stream before the first pass.
            passes: passes to run or to skip.
            confidence_fn: confidence of the outputs of a stream (B, Tq, ...); None without output heads.
        """
        return self(x, passes)

    def penalty(self) -> Tensor | None:
        """Return the auxiliary loss of the last forward pass, a scalar; None without gradient or loss.

        Each loss is returned once. The next forward pass discards it.
        """
        return None

    def mean_depth(self) -> Tensor | None:
        """Return the mean number of passes per token in the last `forward`; None for a fixed depth."""
        return None

    def calibratable_exit(self) -> CalibratableExit | None:
        """Return the exit rule whose threshold can be calibrated; None if there is none."""
        return None

    def pop_mean_acting_depth(self) -> Tensor | None:
        """Return the mean number of passes of acting tokens (`early_exit`) since the last call, and reset it.

        None for a fixed depth, or if there were no tokens.
        """
        return None


class Depth(Technique):
    """Base of the depth techniques: frozen dataclasses that build a `DepthController`."""

    causal_form: ClassVar[str] = "token by token"

    def layer_of_pass(self, pass_index: int) -> int:
        """Return the layer, counted from 0, whose weights a pass uses."""
        return pass_index

    def check_no_early_exit(self, use: str) -> None:
        """Raise ValueError if tokens may exit early, for a ``use`` that needs outputs of the same depth."""

    def check_equal_passes(self, use: object) -> None:
        """Raise ValueError unless all tokens take the same passes, for a ``use`` that needs it."""

    def check_targets(self, targets: object, discrete: bool) -> None:
        """Raise ValueError unless the exit rule supports outputs for these targets.

        Args:
            targets: description of the targets, for the message.
            discrete: True if the outputs are probabilities of choices.
        """

    @property
    def exits_token_by_token(self) -> bool:
        """True if the number of passes of a token depends only on the token itself and on memory."""
        return True

    def build(self, width: int, passes: int) -> DepthController:
        """Return the module; it usually has no parameters."""
        return DepthController()


def unequal_passes_error(depth: Depth, use: object) -> ValueError:
    """Return the error for a ``use`` that needs the same passes for all tokens."""
    return ValueError(
        f"{use} needs the same passes for all tokens, but {depth} decides by token; use depth=Fixed()"
    )


ConfidenceGetter = Callable[[], Tensor]
"""Function that returns the confidence of the current tokens by a `ConfidenceFn`, (B, T).

It is called only if it is needed.
"""

ExitRule = Callable[[int, Tensor, Tensor, ConfidenceGetter], Tensor]
"""Exit rule: a function that returns which tokens exit after a pass, (B, T) bool.

Its arguments are the number of the pass, from 0, its inputs and outputs, (B, T, C) each, and a
`ConfidenceGetter`. It is called after each pass but the last, in order.
"""


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

    def check_equal_passes(self, use: object) -> None:
        raise unequal_passes_error(self, use)

    @abstractmethod
    def loss_weights(self, passes: int) -> Tensor:
        """Return the loss weights of the outputs after each pass, (N,); they sum to 1."""


def normalized_loss_weights(weights: Tensor, exit_coef: float) -> Tensor:
    """Normalize weights (N,) to sum to 1, after scaling all but the last by ``exit_coef``."""
    weights = torch.cat([exit_coef * weights[:-1], weights[-1:]])
    return weights / weights.sum()


class EarlyExitController(DepthController, ABC):
    """Controller with early exits: all passes while learning, as many as needed while acting."""

    def __init__(self, spec: ExitDepth) -> None:
        super().__init__()
        self.spec = spec
        self._taken = DepthCounter()

    def exits(self, x: Tensor, passes: LayerPasses, output: StreamFn) -> ExitOutputs:
        """Return the outputs after each pass. All tokens take all passes."""
        initial, streams = self.initial_features(x, passes), self._all_streams(x, passes)
        outputs = torch.stack([output(stream) for stream in streams])
        states = torch.stack([passes.attention_input(stream) for stream in streams])
        weights = self.spec.loss_weights(len(streams)).to(outputs)
        return ExitOutputs(outputs, weights, states, partial(self.auxiliary_loss, initial, states))

    def _all_streams(self, x: Tensor, passes: LayerPasses) -> list[Tensor]:
        """Return the residual stream after each pass, for the selected tokens."""
        outputs = []
        for number in range(passes.count):
            x = passes.run(number, passes.start_pass(number, x))
            outputs.append(x if number == passes.count - 1 else passes.select_outputs(x))
        return outputs

    @torch.no_grad()
    def early_exit(self, x: Tensor, passes: LayerPasses, confidence_fn: ConfidenceFn | None) -> Tensor:
        """Return the residual stream at the exit of each token; it is copied to later passes."""
        rule = self.exit_rule(x, passes)
        y = passes.select_outputs(x)
        running = filled = passes.select_outputs(passes.filled)
        passes_taken = torch.zeros(filled.shape, device=x.device)
        for number in range(passes.count):
            inputs = passes.start_pass(number, x)
            last = number == passes.count - 1
            if not running.any():
                passes.skip(number, inputs)
                continue
            passes_taken += running
            after = passes.run(number, inputs)
            before, y = y, torch.where(running[..., None], after if last else passes.select_outputs(after), y)
            if not last:
                x = after.clone()
                passes.select_outputs(x).copy_(y)
                confidence = partial(_confidence, confidence_fn, y)
                exits = rule(number, passes.attention_input(before), passes.attention_input(y), confidence)
                running = running & ~exits
        self._taken.add(passes_taken[filled].sum(), filled.sum())
        return y

    def pop_mean_acting_depth(self) -> Tensor | None:
        return self._taken.pop_mean()

    @abstractmethod
    def exit_rule(self, x: Tensor, passes: LayerPasses) -> ExitRule:
        """Return the exit rule; arguments as in `early_exit`."""

    def initial_features(self, x: Tensor, passes: LayerPasses) -> Tensor | None:
        """Return features of the stream x before the first pass for `auxiliary_loss`, (B, Tq, C), or None."""
        return None

    def auxiliary_loss(self, initial: Tensor | None, states: Tensor, targets: ExitTargets) -> Tensor | None:
        """Return the auxiliary loss of the exit classifier, a scalar; by default None: nothing is learned.

        Args:
            initial: result of `initial_features`.
            states: inputs of attention after each pass, (N, B, T, C).
            targets: targets of the classifier.
        """
        return None


def _confidence(confidence_fn: ConfidenceFn | None, stream: Tensor) -> Tensor:
    """Return the confidence of a residual stream."""
    if confidence_fn is None:
        raise ValueError(
            "an exit by the confidence of the outputs needs confidence_fn, a function that returns the "
            "confidence of outputs; or use another confidence, such as CALM('state')"
        )
    return confidence_fn(stream)
