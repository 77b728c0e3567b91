"""Reversible layers: the inputs of a layer are recomputed from its outputs."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlxf.attention.residuals.add import Sum
from rlxf.attention.residuals.base import Residual
from rlxf.attention.technique import SpecView


@dataclass(frozen=True)
class Reversible(Residual):
    """``y_1 = x_1 + Attention(x_2)``, ``y_2 = x_2 + FeedForward(y_1)``: two streams that take turns.

    Both streams start as the token x, and their mean is the output. The backward pass recomputes
    ``x_2 = y_2 - FeedForward(y_1)`` and ``x_1 = y_1 - Attention(x_2)``, so only the last layer stores
    activations for its gradient. Activation memory thus does not grow with the number of layers, for a third
    more computation. Weights, their gradients and a memory state still grow with it. Dropout is the same in
    both directions. Attention, memories and caches read x_2.

    Calls that return inputs of layers (`Transformer.encode`), or the state after a segment, keep the inputs
    of all layers without gradient. A learned memory keeps them until its penalty is computed. The depths
    `ACT`, `CALM` and `DepthAdaptive`, which evaluate each pass, store activations as usual.

    Source: Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020, arXiv:2001.04451, section 3.
    """

    paper: ClassVar[str] = "Kitaev et al. 2020, arXiv:2001.04451"
    cost: ClassVar[str] = "L, a third more to learn"

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless inputs of layers can be recomputed from their outputs."""
        if choices.norm == "post":
            raise ValueError(f"{self} cannot invert a norm after the residual connection; use norm='pre'")
        if choices.cross_attention:
            raise ValueError(
                f"{self} recomputes inputs of layers from their outputs and does not support "
                f"cross_attention=True; choose another residual"
            )
        kernel: Any = choices.kernel
        if kernel.loss_depends_on_tokens:
            raise ValueError(
                f"{self} runs layers twice, and the auxiliary loss of {kernel} depends on tokens; set its "
                f"coefficient to 0, or choose another residual or kernel"
            )

    def build(self, width: int, heads: int) -> Sum:
        """Return the sum of one stream and the sublayer output of the other."""
        return Sum()

    def init_stream(self, x: Tensor) -> Tensor:
        """Concatenate both streams: (..., 2 C)."""
        return torch.cat([x, x], dim=-1)

    def attention_input(self, stream: Tensor) -> Tensor:
        """Return x_2."""
        return stream.chunk(2, dim=-1)[1]

    def output(self, stream: Tensor) -> Tensor:
        """Return the mean of both streams."""
        return stream.unflatten(-1, (2, -1)).mean(dim=-2)
