"""Image Transformer's local attention over a sequence: blocks see themselves and what is around them."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlxf.attention.checks import check_whole
from rlxf.attention.patterns.base import GROUP, Pattern, between


@dataclass(frozen=True)
class Local1D(Pattern):
    """Query i of block ``[s, s + block)`` sees the keys of ``[s - margin, s + block + margin)``.

    In a causal transformer that is the paper's masked form: the own block up to the query, and ``margin``
    tokens before it. All queries of a block see the same stretch, however far from its borders they are.

    Source: Parmar et al. 2018, arXiv:1802.05751, section 3.2, 1D local attention. There is no scale
    1/sqrt(D) in the authors' code; ours is the kernel's.

    Args:
        block: queries that share their keys, in tokens (the paper's l_q).
        margin: keys on either side of the block; before it alone where causal (the paper's l_m).

    Raises:
        TypeError: if one of them is no whole number.
        ValueError: if block is less than 1 or margin less than 0.
    """

    paper: ClassVar[str] = "Parmar et al. 2018, arXiv:1802.05751"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L (block + margin) pairs"
    block: int = 64
    margin: int = 64

    def __post_init__(self) -> None:
        check_whole("Local1D block", self.block)
        check_whole("Local1D margin", self.margin, least=0)

    @property
    def reach(self) -> int:
        """block - 1 + margin."""
        return self.block - 1 + self.margin

    @property
    def period(self) -> int:
        """A block."""
        return self.block

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """See above."""
        start = i - i % self.block
        return (j >= start - self.margin) & (j < start + self.block + self.margin)

    def group(self, i: Tensor) -> Tensor:
        """Blocks, cut if they are large."""
        return i.div(self.block, rounding_mode="floor") * self.block + i % self.block // GROUP

    def keys(self, i: Tensor, among: Tensor) -> Tensor:
        """See `Pattern`."""
        first, last = int(i.min()), int(i.max())
        start, end = first - first % self.block, last - last % self.block + self.block
        return between(start - self.margin, end + self.margin - 1, among)
