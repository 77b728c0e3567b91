"""Sigmoid-tanh gate: the sublayer output is squashed and scaled before it is added."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.init import stacked_orthogonal
from rlxf.attention.residuals.base import BiasedGate, Gate


@dataclass(frozen=True)
class SigTanhGate(BiasedGate):
    """``g(x, y) = x + sigmoid(W_g y - b) * tanh(U_g y)``.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2.

    Args:
        bias: initial value of b, one learned number for each feature; large values are near the identity.

    Raises:
        TypeError: if bias is not a number.
        ValueError: if bias is not finite.
    """

    paper: ClassVar[str] = "Parisotto et al. 2020, arXiv:1910.06764"

    def build(self, width: int, heads: int) -> "SigTanh":
        """Return the module."""
        return SigTanh(self, width)


class SigTanh(Gate):
    """Module of `SigTanhGate`: W (2 C, C) holds W_g and U_g; b (C,)."""

    def __init__(self, spec: SigTanhGate, width: int):
        super().__init__()
        self.w = stacked_orthogonal(2, width, width)
        self.b = spec.start(width)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        scale, update = F.linear(y, self.w).chunk(2, dim=-1)
        return x + (scale - self.b).sigmoid() * update.tanh()
