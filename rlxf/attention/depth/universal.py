"""Universal Transformer: one layer, again and again."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.depth.base import Depth


@dataclass(frozen=True)
class Universal(Depth):
    """``h^n = layer(h^(n-1))`` for n = 1 ... N: all passes share the weights of one layer.

    N is the number of ``layers`` of the transformer. The paper tells tokens which pass they are in: choose
    the position `UniversalSinusoid`. With `ACT` each token finds its own N.

    Source: Dehghani et al. 2019, arXiv:1807.03819, section 2.1.
    """

    paper: ClassVar[str] = "Dehghani et al. 2019, arXiv:1807.03819"
    cost: ClassVar[str] = "L"

    def layer_of(self, number: int) -> int:
        """See `Depth`: always the first."""
        return 0
