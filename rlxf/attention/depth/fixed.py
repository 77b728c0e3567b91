"""Fixed depth: every token passes every layer once."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.depth.base import Depth


@dataclass(frozen=True)
class Fixed(Depth):
    """Layers 0, 1, ... in order, each once, for every token.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762"
    cost: ClassVar[str] = "L"
