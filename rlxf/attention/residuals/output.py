"""Output gate: the sublayer's output is scaled before it is added."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.linear import stacked
from rlxf.attention.residuals.base import Biased, Gate


@dataclass(frozen=True)
class OutputGate(Biased):
    """``g(x, y) = x + sigmoid(W_g x - b) * y``.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2.

    Args:
        bias: start of b, one learned number for each feature; large is near the identity.

    Raises:
        TypeError: if bias is no number.
        ValueError: if it is not finite.
    """

    paper: ClassVar[str] = "Parisotto et al. 2020, arXiv:1910.06764"

    def build(self, width: int, heads: int) -> "Output":
        """The module."""
        return Output(self, width)


class Output(Gate):
    """W_g (C, C) and b (C,)."""

    def __init__(self, spec: OutputGate, width: int):
        super().__init__()
        self.w = stacked(1, width, width)
        self.b = spec.start(width)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        """g(x, y)."""
        return x + F.linear(x, self.w, -self.b).sigmoid() * y
