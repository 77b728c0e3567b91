"""Plain residual connection: x + y."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from rlxf.attention.residuals.base import Residual


@dataclass(frozen=True)
class Add(Residual):
    """``x + y``.

    Source: He et al. 2016, arXiv:1512.03385, section 3.1.
    """

    paper: ClassVar[str] = "He et al. 2016, arXiv:1512.03385"

    def build(self, width: int, heads: int) -> "Sum":
        """Return the module; it has no parameters."""
        return Sum()


class Sum(nn.Module):
    """Module of `Add`: x + y."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y, for x (..., C) and y (..., C): (..., C)."""
        return x + y
