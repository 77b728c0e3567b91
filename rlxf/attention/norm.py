"""Placement of layer norm: before a sublayer (pre-norm) or after its residual connection (post-norm)."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Literal["pre", "post"]


class PreNorm(nn.Module):
    """Pre-norm: ``residual(x, f(norm(x)))``. The residual stream itself is never normalized.

    Source: Xiong et al. 2020, arXiv:2002.04745; Parisotto et al. 2020, arXiv:1910.06764, section
    3.1 ("identity map reordering").

    Args:
        width: features of a token C.
        residual: module ``residual(x, y)`` that combines the stream x and the sublayer's output y.
    """

    def __init__(self, width: int, residual: nn.Module):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.residual = residual

    def branch_input(self, x: Tensor) -> Tensor:
        """Compute the input of the sublayer from the residual stream: (B, T, C) -> (B, T, C)."""
        return self.normalize(x)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize the input x (B, T, C) of the sublayer."""
        h: Tensor = self.norm(x)
        return h

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``weight normalize(x) + bias`` for an x that needs no gradient.

        Scale and shift of the norm are folded into weight and bias. Their gradients then need no product
        of the size of x, so backward costs as much as forward instead of twice as much.
        """
        norm = self.norm
        normalized = F.layer_norm(x, norm.normalized_shape, eps=norm.eps)
        return F.linear(normalized, weight * norm.weight, torch.addmv(bias, weight, norm.bias))

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        """Combine the residual stream x and the sublayer's output y."""
        combined: Tensor = self.residual(x, y)
        return combined


class PostNorm(PreNorm):
    """Post-norm: ``norm(residual(x, f(x)))``, as in the original transformer.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    def normalize(self, x: Tensor) -> Tensor:
        """Return x unchanged."""
        return x

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``weight x + bias``."""
        return F.linear(x, weight, bias)

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        """Combine stream and sublayer output, then normalize."""
        combined: Tensor = self.norm(self.residual(x, y))
        return combined


NORMS: dict[Norm, type[PreNorm]] = {"pre": PreNorm, "post": PostNorm}
"""Sublayer norms by name."""
