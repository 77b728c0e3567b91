"""Sigmoid-tanh gate: what is added is squashed and scaled by the sublayer's own output."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.linear import stacked
from rlxf.attention.residuals.base import Biased, Gate


@dataclass(frozen=True)
class SigTanhGate(Biased):
    """``g(x, y) = x + sigmoid(W_g y - b) * tanh(U_g y)``.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2.

    Args:
        bias: start of b, one learned number for each feature; large is near the identity.

    Raises:
        TypeError: if bias is no number.
        ValueError: if it is not finite.
    """

    paper: ClassVar[str] = "Parisotto et al. 2020, arXiv:1910.06764"

    def build(self, width: int, heads: int) -> "SigTanh":
        """The module."""
        return SigTanh(self, width)


class SigTanh(Gate):
    """W (2 C, C) holds W_g and U_g; b (C,)."""

    def __init__(self, spec: SigTanhGate, width: int):
        super().__init__()
        self.w = stacked(2, width, width)
        self.b = spec.start(width)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        """g(x, y)."""
        scale, update = F.linear(y, self.w).chunk(2, dim=-1)
        return x + (scale - self.b).sigmoid() * update.tanh()
