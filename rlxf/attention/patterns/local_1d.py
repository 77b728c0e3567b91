"""Image Transformer's 1D local attention: blocks of queries see themselves and a margin."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlxf.attention.patterns.base import Pattern, group_in_blocks, positions_between
from rlxf.attention.validation import check_int


@dataclass(frozen=True)
class Local1D(Pattern):
    """Query i of block ``[s, s + block)`` sees the keys of ``[s - margin, s + block + margin)``.

    In a causal transformer this is the paper's masked form: the query's block up to the query, and ``margin``
    tokens before the block. All queries of a block see the same range, whatever their distance from its
    borders.

    Source: Parmar et al. 2018, arXiv:1802.05751, section 3.2, 1D local attention. The authors' code has no
    scale 1/sqrt(D); the scale here is the kernel's.

    Args:
        block: number of queries that share their keys, in tokens (the paper's l_q).
        margin: number of keys on either side of the block; in a causal transformer, only before it (the
            paper's l_m).

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if block is less than 1 or margin is less than 0.
    """

    paper: ClassVar[str] = "Parmar et al. 2018, arXiv:1802.05751"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L (block + margin) pairs"
    block: int = 64
    margin: int = 64

    def __post_init__(self) -> None:
        check_int("Local1D block", self.block)
        check_int("Local1D margin", self.margin, least=0)

    @property
    def max_distance(self) -> int:
        """``block - 1 + margin``."""
        return self.block - 1 + self.margin

    @property
    def shift_period(self) -> int:
        """Length of a block."""
        return self.block

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        start = i - i % self.block
        return (j >= start - self.margin) & (j < start + self.block + self.margin)

    def group(self, i: Tensor) -> Tensor:
        return group_in_blocks(i, self.block)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        first, last = int(i.min()), int(i.max())
        start, end = first - first % self.block, last - last % self.block + self.block
        return positions_between(start - self.margin, end + self.margin - 1, positions)
