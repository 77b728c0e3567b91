"""Output gate: the sublayer output is scaled before it is added."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.init import stacked_orthogonal
from rlxf.attention.residuals.base import BiasedGate, Gate


@dataclass(frozen=True)
class OutputGate(BiasedGate):
    """``g(x, y) = x + sigmoid(W_g x - b) * y``.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2.

    Args:
        bias: initial value of b, one learned number for each feature; large values are near the identity.

    Raises:
        TypeError: if bias is not a number.
        ValueError: if bias is not finite.
    """

    paper: ClassVar[str] = "Parisotto et al. 2020, arXiv:1910.06764"

    def build(self, width: int, heads: int) -> "Output":
        """Return the module."""
        return Output(self, width)


class Output(Gate):
    """Module of `OutputGate`: W_g (C, C) and b (C,)."""

    def __init__(self, spec: OutputGate, width: int):
        super().__init__()
        self.w = stacked_orthogonal(1, width, width)
        self.b = spec.start(width)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        return x + F.linear(x, self.w, -self.b).sigmoid() * y
