"""Sparse Transformer's fixed attention: the query's block, and summary columns of other blocks."""

from dataclasses import dataclass, replace
from typing import ClassVar, get_args

from torch import Tensor

from rlxf.attention.patterns.base import BlockPattern, Either, Pattern, group_in_blocks
from rlxf.attention.patterns.strided import Combination
from rlxf.attention.validation import check_choice, check_int


@dataclass(frozen=True)
class FixedColumns(Pattern):
    """Two rules: A1, i and j are in one block of l, and A2, ``j mod l >= l - c``: j is one of its last c.

    The last c tokens of each block summarize it for all later tokens. With ``interleaved`` layers alternate
    between A1 and A2, with ``heads`` heads alternate, and with ``merged`` a query sees the keys of both. With
    n ``summaries``, head h reads the (h mod n)-th c columns from the end, as in the authors' code: heads use
    different summaries.

    In layers or heads with only A2, the first tokens of an episode see no keys, and their output is 0. The
    bidirectional form is ours: it includes summaries of later blocks. The paper calls this pattern
    "fixed"; in this package, `Fixed` is a depth technique.

    Source: Child et al. 2019, arXiv:1904.10509, sections 4.2 and 4.3.

    Args:
        stride: l, in tokens; near the square root of the length L, the cost grows with L^1.5.
        columns: c, in tokens.
        way: how the rules are combined.
        summaries: n; ``n columns`` must not exceed ``stride``.

    Raises:
        TypeError: if a size is not an integer.
        ValueError: if a size is less than 1, the columns do not fit in a block, or way is unknown.
    """

    paper: ClassVar[str] = "Child et al. 2019, arXiv:1904.10509"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L (stride + L columns / stride) pairs"
    stride: int = 32
    columns: int = 4
    way: Combination = "merged"
    summaries: int = 1

    def __post_init__(self) -> None:
        for name in ("stride", "columns", "summaries"):
            check_int(f"FixedColumns {name}", getattr(self, name))
        check_choice("FixedColumns way", self.way, get_args(Combination))
        if self.summaries * self.columns > self.stride:
            raise ValueError(
                f"FixedColumns requires summaries * columns <= stride, "
                f"got {self.summaries} * {self.columns} > {self.stride}"
            )

    @property
    def rules(self) -> tuple[Pattern, Pattern]:
        """Rules A1 and A2."""
        last = self.stride
        return SameBlock(self.stride), Columns(self.stride, last - self.summaries * self.columns, last)

    @property
    def shift_period(self) -> int:
        """Length of a block."""
        return self.stride

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether A1 or A2 allows the pair."""
        return Either(*self.rules).mask_mod(i, j)

    def for_layer(self, layer: int) -> Pattern:
        if self.way != "interleaved":
            return self
        return self.rules[0] if layer % 2 == 0 else SummaryColumns(replace(self, way="merged"))

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        if self.way == "heads":
            return tuple((self.rules[0], self.head_columns(head // 2))[head % 2] for head in range(heads))
        if self.summaries == 1:
            return (Either(*self.rules),)
        return tuple(Either(self.rules[0], self.head_columns(head)) for head in range(heads))

    def head_columns(self, head: int) -> Pattern:
        """Return A2 of a head."""
        last = self.stride - head % self.summaries * self.columns
        return Columns(self.stride, last - self.columns, last)


@dataclass(frozen=True)
class SummaryColumns(Pattern):
    """Rule A2 of a `FixedColumns`."""

    of: FixedColumns

    @property
    def shift_period(self) -> int:
        """Length of a block."""
        return self.of.stride

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        return self.of.rules[1].mask_mod(i, j)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        return tuple(self.of.head_columns(head) for head in range(heads if self.of.summaries > 1 else 1))


@dataclass(frozen=True)
class SameBlock(BlockPattern):
    """Pattern in which i and j are in the same block."""

    block: int

    @property
    def max_distance(self) -> int:
        """``block - 1``."""
        return self.block - 1

    @property
    def shift_period(self) -> int:
        """Length of a block."""
        return self.block

    def block_mask_mod(self, a: Tensor, b: Tensor) -> Tensor:
        return a == b


@dataclass(frozen=True)
class Columns(Pattern):
    """Pattern ``first <= j mod stride < last``."""

    stride: int
    first: int
    last: int

    @property
    def shift_period(self) -> int:
        """Length of a block."""
        return self.stride

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        return (i == i) & (j % self.stride >= self.first) & (j % self.stride < self.last)

    def group(self, i: Tensor) -> Tensor:
        """Return the block of each position, with large blocks divided into groups."""
        return group_in_blocks(i, self.stride)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        return positions[self.mask_mod(positions, positions)]
