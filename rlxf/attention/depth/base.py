"""Base classes of the depth techniques: the order of layers and early exits."""

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from rlxf.attention.technique import Technique
from rlxf.attention.token_index import TokenIndex

ConfidenceFn = Callable[[Tensor], Tensor]
"""Confidence function: outputs (..., C) -> lead of the most likely choice, (...); see `lead`."""


class LayerPasses(Protocol):
    """Passes of tokens through layers in one call of a transformer.

    All tokens enter every pass, in order, even if they skip its computation: keys and values for later tokens
    are computed from the inputs of a pass. Tokens x are the residual stream: usually (B, T, C).
    """

    @property
    def count(self) -> int:
        """Number of passes N."""
        ...

    @property
    def index(self) -> TokenIndex:
        """Positions and episodes of the tokens, (B, T)."""
        ...

    @property
    def filled(self) -> Tensor:
        """Mask of tokens, as opposed to empty slots, (B, T) bool."""
        ...

    def run_all(self, x: Tensor) -> Tensor:
        """Run all passes, each once, on x (B, T, C) and return the selected outputs, (B, Tq, C)."""
        ...

    def start_pass(self, number: int, x: Tensor) -> Tensor:
        """Return the input x (B, T, C) of pass ``number``, and add it to the memory of that pass."""
        ...

    def run(self, number: int, x: Tensor) -> Tensor:
        """Run the layer of a pass on all tokens: (B, T, C), in the last pass (B, Tq, C)."""
        ...

    def skip(self, number: int, x: Tensor) -> None:
        """Skip a pass that no token needs, and store its input x for later tokens."""
        ...

    def attention_input(self, x: Tensor) -> Tensor:
        """Return the input of attention for the residual stream x: (B, T, C)."""
        ...

    def select_outputs(self, x: Tensor) -> Tensor:
        """Select the tokens whose outputs are requested, (B, Tq, ...), of all tokens (B, T, ...)."""
        ...


class CalibratableExit(Protocol):
    """Exit rule that compares a confidence with a threshold, which calibration may set."""

    threshold: Tensor
    """Confidence from which a token exits, a scalar."""
    spec_threshold: float
    """Threshold of the spec, which holds until calibration."""

    def confidence(self, number: int, before: Tensor, after: Tensor, lead: Callable[[], Tensor]) -> Tensor:
        """Return the confidence of each token after a pass, (B, T).

        Args:
            number: number of the pass, from 0.
            before: states before the pass, (B, T, C).
            after: states after the pass, (B, T, C).
            lead: function that computes the `ConfidenceFn` of the current outputs.
        """
        ...


class DepthCounter:
    """Mean number of passes of acting tokens since the last call of `mean`."""

    def __init__(self) -> None:
        self._passes: Tensor | float = 0.0
        self._tokens: Tensor | int = 0

    def add(self, passes: Tensor, tokens: Tensor) -> None:
        """Add numbers of passes and of tokens, scalars."""
        self._passes, self._tokens = self._passes + passes, self._tokens + tokens

    def mean(self) -> Tensor | None:
        """Return the mean number of passes per token and reset it; None if there were no tokens."""
        passes, tokens = self._passes, self._tokens
        self._passes, self._tokens = 0.0, 0
        return torch.as_tensor(passes / tokens) if tokens else None


class DepthController(nn.Module):
    """Controller of the passes. By default each token takes each pass once."""

    def forward(self, x: Tensor, passes: LayerPasses) -> Tensor:
        """Process tokens x (B, T, C) and return the selected outputs, (B, Tq, C)."""
        return passes.run_all(x)

    def early_exit(self, x: Tensor, passes: LayerPasses, judge: ConfidenceFn | None) -> Tensor:
        """Compute `forward` for acting tokens, with early exits; by default without them.

        Args:
            x: residual stream before the first pass.
            passes: passes to run or to skip.
            judge: confidence of the outputs of a stream (B, Tq, ...); None if they have no output heads.
        """
        y: Tensor = self(x, passes)
        return y

    def penalty(self) -> Tensor | None:
        """Return the auxiliary loss of the last forward pass with gradient, a scalar, or None.

        Each loss is returned once.
        """
        return None

    def mean_depth(self) -> Tensor | None:
        """Return the mean number of passes per token in the last forward pass; None for a fixed depth."""
        return None

    def calibratable_exit(self) -> CalibratableExit | None:
        """Return the exit rule whose threshold can be calibrated; None if there is none."""
        return None

    def mean_acting_depth(self) -> Tensor | None:
        """Return the mean number of passes of acting tokens (`early`) since the last call.

        None for a fixed depth.
        """
        return None


class Depth(Technique):
    """Base of the depth techniques: frozen dataclasses that build a `DepthController`."""

    causal: ClassVar[str] = "token by token"

    def layer_of_pass(self, number: int) -> int:
        """Return the layer, counted from 0, whose weights a pass uses."""
        return number

    def check_no_early_exit(self, use: str) -> None:
        """Raise ValueError if tokens may exit early, for a ``use`` that needs outputs of the same depth."""

    def check_targets(self, targets: object, discrete: bool) -> None:
        """Raise ValueError unless the exit rule supports outputs for these targets.

        Args:
            targets: description of the targets, for the message.
            discrete: True if the outputs are probabilities of choices.
        """

    def build(self, width: int, passes: int) -> DepthController:
        """Return the module; it usually has no parameters."""
        return DepthController()
