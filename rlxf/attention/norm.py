"""Norms, and their place in a sublayer with a residual connection."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.linear import TokenFunction, bound, is_patched, mixed_linear, own_method

NormType = Literal["layer_norm", "rms_norm"]


class LayerNorm(nn.LayerNorm):
    """Layer norm that can be folded into the projection that follows it."""

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``weight norm(x) + bias``, with scale and shift of the norm folded into weight and bias."""
        normalized = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        return mixed_linear(normalized, weight * self.weight, torch.addmv(bias, weight, self.bias))

    def bind(self) -> TokenFunction:
        """Return the norm as a `bound` function."""
        shape = self.normalized_shape
        weight = self.weight
        bias = self.bias
        eps = self.eps
        return lambda x: F.layer_norm(x, shape, weight, bias, eps)


class RMSNorm(nn.RMSNorm):
    """``w x / sqrt(mean(x^2) + eps)``: it has a scale w only, and does not subtract the mean.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.

    Args:
        width: features C.
        eps: 1e-5, as in `LayerNorm`.
    """

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__(width, eps=eps)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``weight norm(x) + bias``, with the scale of the norm folded into weight."""
        return mixed_linear(F.rms_norm(x, self.normalized_shape, eps=self.eps), weight * self.weight, bias)


NORM_TYPES: dict[NormType, Callable[[int], LayerNorm | RMSNorm]] = {
    "layer_norm": LayerNorm,
    "rms_norm": RMSNorm,
}
"""Normalizations by name."""


Norm = Literal["pre", "post"]


class PreNorm(nn.Module):
    """Pre-norm: ``residual(x, f(norm(x)))``. The residual stream itself is never normalized.

    Source: Xiong et al. 2020, arXiv:2002.04745; Parisotto et al. 2020, arXiv:1910.06764, section
    3.1 ("identity map reordering").

    Args:
        width: features of a token C.
        residual: module ``residual(x, y)`` that combines the stream x and the sublayer's output y.
        norm_type: normalization.
    """

    def __init__(self, width: int, residual: nn.Module, norm_type: NormType = "layer_norm"):
        super().__init__()
        self.norm: nn.Module = NORM_TYPES[norm_type](width)
        self.residual = residual

    def branch_input(self, x: Tensor) -> Tensor:
        """Compute the input of the sublayer from the residual stream: (B, T, C) -> (B, T, C)."""
        return self.normalize(x)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize the input x (B, T, C) of the sublayer."""
        return self.norm(x)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``weight normalize(x) + bias`` for an x that needs no gradient.

        Scale and shift of the norm are folded into weight and bias. Their gradients then need no product
        of the size of x, so backward costs as much as forward instead of twice as much. A norm that
        `is_patched`, or of another class, is called instead.
        """
        fold = own_method(self.norm, "project")
        if fold is None or is_patched(self.norm):
            return mixed_linear(self.normalize(x), weight, bias)
        folded: Tensor = fold(x, weight, bias)
        return folded

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        """Combine the residual stream x and the sublayer's output y."""
        return self.residual(x, y)

    def bind_around(self, sublayer: TokenFunction) -> TokenFunction:
        """Return the sublayer with its norm and residual connection as a `bound` function of the stream.

        Further arguments are passed to ``sublayer``.
        """
        norm, residual = bound(self.norm), bound(self.residual)
        return lambda x, *inputs: residual(x, sublayer(norm(x), *inputs))


class PostNorm(PreNorm):
    """Post-norm: ``norm(residual(x, f(x)))``, as in the original transformer.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    def normalize(self, x: Tensor) -> Tensor:
        """Return x unchanged."""
        return x

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``weight x + bias``."""
        return mixed_linear(x, weight, bias)

    def combine(self, x: Tensor, y: Tensor) -> Tensor:
        """Combine stream and sublayer output, then normalize."""
        return self.norm(self.residual(x, y))

    def bind_around(self, sublayer: TokenFunction) -> TokenFunction:
        norm, residual = bound(self.norm), bound(self.residual)
        return lambda x, *inputs: norm(residual(x, sublayer(x, *inputs)))


NORMS: dict[Norm, type[PreNorm]] = {"pre": PreNorm, "post": PostNorm}
"""Places of the norm of a sublayer, by name."""
