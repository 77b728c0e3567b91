"""Constant depth: every token takes the same number of passes."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.depth.base import Depth


@dataclass(frozen=True)
class Fixed(Depth):
    """Layers 0, 1, ... in order, each once, for every token.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762"
    cost: ClassVar[str] = "L in each pass"


@dataclass(frozen=True)
class Universal(Depth):
    """``h^n = layer(h^(n-1))`` for n = 1 ... N: all passes share the weights of one layer.

    N is the option ``layers`` of the transformer. The paper adds an encoding of the pass number: choose the
    position `UniversalSinusoid`. With `ACT` the number of passes is learned for each token.

    Source: Dehghani et al. 2019, arXiv:1807.03819, section 2.1.
    """

    paper: ClassVar[str] = "Dehghani et al. 2019, arXiv:1807.03819"
    cost: ClassVar[str] = "L in each pass"

    def layer_of_pass(self, pass_index: int) -> int:
        """Return 0: all passes use the first layer."""
        return 0
