"""Fixed depth: every token passes every layer once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Fixed:
    """Layers 0, 1, ... in order, each once, for every token.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762"
    causal: ClassVar[str] = "token by token"
    cost: ClassVar[str] = "L"

    def __call__(self, layers: int) -> Iterator[int]:
        """The layers to run, in order."""
        return iter(range(layers))
