"""Reversible layers: what a layer was given is computed back from what it gave."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlxf.attention.residuals.add import Sum
from rlxf.attention.residuals.base import Residual
from rlxf.attention.technique import Choices


@dataclass(frozen=True)
class Reversible(Residual):
    """``y_1 = x_1 + Attention(x_2)``, ``y_2 = x_2 + FeedForward(y_1)``: two streams that take turns.

    Both begin as the token x, and their mean is the output. Backward, ``x_2 = y_2 - FeedForward(y_1)`` and
    ``x_1 = y_1 - Attention(x_2)``: no layer but the last keeps what it computed for its gradient. So the
    memory that learning needs does not grow with the number of layers, for a third more computation: weights,
    their gradients and a remembered state aside, which have a part for each layer. What is dropped out is
    the same in both directions. Attention of others, memories and caches read x_2.

    Who asks for inputs of layers (`Transformer.encode`), or for the state after a segment, gets those of all;
    until then they are kept, but not for the gradient. A memory that learns keeps them until its penalty is
    asked for. Depths that ask for each pass, `ACT`, `CALM` and `DepthAdaptive`, keep what it computed all
    the same.

    Source: Gomez et al. 2017, arXiv:1707.04585; Kitaev et al. 2020, arXiv:2001.04451, section 3.
    """

    paper: ClassVar[str] = "Kitaev et al. 2020, arXiv:2001.04451"
    cost: ClassVar[str] = "L, a third more to learn"

    def check(self, choices: Choices) -> None:
        """See `Residual`: what a layer was given can be computed back from what it gave."""
        if choices.norm == "post":
            raise ValueError(f"{self} cannot be computed back through a norm; use norm='pre'")
        if choices.cross_attention:
            raise ValueError(
                f"{self} computes layers back from their outputs alone, and cross_attention=True brings "
                f"other tokens; choose another residual"
            )
        kernel: Any = choices.kernel
        if kernel.prices_tokens:
            raise ValueError(
                f"{self} computes what tokens say twice, and {kernel} puts a price on it; set that to 0, or "
                f"choose another residual or kernel"
            )

    def build(self, width: int, heads: int) -> Sum:
        """See `Residual`: a half of the stream and what a sublayer made of the other."""
        return Sum()

    def opened(self, x: Tensor) -> Tensor:
        """See `Residual`: both streams, side by side, (..., 2 C)."""
        return torch.cat([x, x], dim=-1)

    def read(self, stream: Tensor) -> Tensor:
        """See `Residual`: x_2."""
        return stream.chunk(2, dim=-1)[1]

    def closed(self, stream: Tensor) -> Tensor:
        """See `Residual`: the mean of both."""
        return stream.unflatten(-1, (2, -1)).mean(dim=-2)
