"""Where the layer norm stands: before a sublayer or behind it."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.residuals.base import Residual
from rlxf.attention.residuals.reversible import Reversible

Norm = Literal["pre", "post"]


class PreNorm(nn.Module):
    """``residual(x, f(norm(x)))``: the stream itself is never normalised.

    Source: Xiong et al. 2020, arXiv:2002.04745; Parisotto et al. 2020, arXiv:1910.06764, section
    3.1 ("identity map reordering").
    """

    def __init__(self, width: int, heads: int, residual: Residual):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.residual = residual.build(width, heads)

    def enter(self, x: Tensor) -> Tensor:
        """What the sublayer reads of the stream: (B, T, C) -> (B, T, C)."""
        return self.read(x)

    def read(self, x: Tensor) -> Tensor:
        """What the sublayer makes of tokens x (B, T, C) before all else."""
        h: Tensor = self.norm(x)
        return h

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """``weight enter(x) + bias`` for an x that needs no gradient.

        The norm's own scale and shift join the weight and the bias. So its gradient needs no product as
        large as x: backward costs as much as forward, not twice.
        """
        norm = self.norm
        standard = F.layer_norm(x, norm.normalized_shape, eps=norm.eps)
        return F.linear(standard, weight * norm.weight, torch.addmv(bias, weight, norm.bias))

    def leave(self, x: Tensor, y: Tensor) -> Tensor:
        """Join the sublayer's output y to the stream x."""
        joined: Tensor = self.residual(x, y)
        return joined


class PostNorm(PreNorm):
    """``norm(residual(x, f(x)))``, as in the original transformer.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    def read(self, x: Tensor) -> Tensor:
        """x as it is."""
        return x

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """``weight x + bias``."""
        return F.linear(x, weight, bias)

    def leave(self, x: Tensor, y: Tensor) -> Tensor:
        """Join, then normalise."""
        joined: Tensor = self.norm(self.residual(x, y))
        return joined


class HalfNorm(PreNorm):
    """`PreNorm` on one of the two streams of a `Reversible`, added to the other.

    Args:
        reads: which one is read, 0 or 1.
    """

    def __init__(self, width: int, heads: int, residual: Residual, reads: int):
        super().__init__(width, heads, residual)
        self.reads = reads

    def enter(self, x: Tensor) -> Tensor:
        """What the sublayer reads of the stream: (B, T, 2 C) -> (B, T, C)."""
        return self.read(x.chunk(2, dim=-1)[self.reads])

    def leave(self, x: Tensor, y: Tensor) -> Tensor:
        """Join y (B, T, C) to the other stream of x (B, T, 2 C)."""
        halves = list(x.chunk(2, dim=-1))
        halves[1 - self.reads] = super().leave(halves[1 - self.reads], y)
        return torch.cat(halves, dim=-1)


def joins(norm: Norm, width: int, heads: int, residual: Residual) -> tuple[PreNorm, PreNorm]:
    """How attention and feed-forward of a layer join the stream."""
    if isinstance(residual, Reversible):
        return HalfNorm(width, heads, residual, reads=1), HalfNorm(width, heads, residual, reads=0)
    attention, feed_forward = (NORMS[norm](width, heads, residual) for _ in range(2))
    return attention, feed_forward


NORMS: dict[Norm, type[PreNorm]] = {"pre": PreNorm, "post": PostNorm}
