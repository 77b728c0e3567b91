"""Highway gate: a convex combination of stream and sublayer output."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.init import stacked_orthogonal
from rlxf.attention.residuals.base import BiasedGate, Gate


@dataclass(frozen=True)
class HighwayGate(BiasedGate):
    """``g(x, y) = s * x + (1 - s) * y`` with ``s = sigmoid(W_g x + b)``.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2, after Srivastava et al. 2015.

    Args:
        bias: initial value of b, one learned number for each feature; large values are near the identity.

    Raises:
        TypeError: if bias is not a number.
        ValueError: if bias is not finite.
    """

    paper: ClassVar[str] = "Parisotto et al. 2020, arXiv:1910.06764"

    def build(self, width: int, heads: int) -> "Highway":
        """Return the module."""
        return Highway(self, width)


class Highway(Gate):
    """Module of `HighwayGate`: W_g (C, C) and b (C,)."""

    def __init__(self, spec: HighwayGate, width: int):
        super().__init__()
        self.w = stacked_orthogonal(1, width, width)
        self.b = spec.start(width)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(y, x, F.linear(x, self.w, self.b).sigmoid())
