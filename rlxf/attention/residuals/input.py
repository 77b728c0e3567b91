"""Input gate: the stream is scaled before the sublayer output is added."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.init import stacked_orthogonal
from rlxf.attention.residuals.base import Gate, Residual


@dataclass(frozen=True)
class InputGate(Residual):
    """``g(x, y) = sigmoid(W_g x) * x + y``.

    The paper's gate has no bias: it is not the identity for any bias.

    Source: Parisotto et al. 2020, arXiv:1910.06764, section 3.2.
    """

    paper: ClassVar[str] = "Parisotto et al. 2020, arXiv:1910.06764"

    def build(self, width: int, heads: int) -> "Input":
        """Return the module."""
        return Input(width)


class Input(Gate):
    """Module of `InputGate`: W_g (C, C)."""

    def __init__(self, width: int):
        super().__init__()
        self.w = stacked_orthogonal(1, width, width)

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        return F.linear(x, self.w).sigmoid() * x + y
