"""Blockwise attention: in each head, a block of queries sees one block of keys."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlxf.attention.checks import check_whole
from rlxf.attention.patterns.base import BlockPattern, Pattern

MOST_BLOCKS = 2**16
"""That a permutation may have: it is held as numbers, for each head."""


@dataclass(frozen=True)
class Blockwise(BlockPattern):
    """In head h, block a of queries sees block ``pi_h(a)`` of keys, with ``pi_h`` a permutation of n blocks.

    The paper takes cyclic shifts. By default ours are ``pi_h(a) = (a - h) mod n``: head 0 sees the block
    of the query, head 1 the one before, and so on. Longer sequences are cut into stretches of n blocks.

    The causal form is ours: what lies ahead is hidden. A query that then sees nothing in a head gets nothing
    from it.

    Source: Qiu et al. 2020, arXiv:1911.02972, section 3.2.

    Args:
        block: tokens of a block.
        blocks: n, the blocks that are permuted.
        permutations: ``pi_h`` for each head in turn, each with the numbers 0 ... n - 1; none for shifts.

    Raises:
        TypeError: if block or blocks is no whole number, or permutations are no tuples.
        ValueError: if one is less than 1, blocks more than 65,536, or a permutation is none of n numbers.
    """

    paper: ClassVar[str] = "Qiu et al. 2020, arXiv:1911.02972"
    causal: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L block pairs"
    block: int = 64
    blocks: int = 8
    permutations: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_whole("Blockwise block", self.block)
        check_whole("Blockwise blocks", self.blocks, most=MOST_BLOCKS)
        self._check_permutations()
        object.__setattr__(self, "permutations", tuple(tuple(one) for one in self.permutations))

    def _check_permutations(self) -> None:
        if not _is_row(self.permutations) or not all(map(_is_row, self.permutations)):
            raise TypeError(f"Blockwise permutations must be a tuple of tuples, got {self.permutations!r}")
        for one in self.permutations:
            if len(one) != self.blocks or set(one) != set(range(self.blocks)):
                raise ValueError(
                    f"Blockwise permutations must hold 0 to {self.blocks - 1} once each, got {one}"
                )

    @property
    def reach(self) -> int:
        """blocks * block - 1."""
        return self.blocks * self.block - 1

    def meets(self, a: Tensor, b: Tensor) -> Tensor:
        """Some head may: see `for_heads`."""
        return a.div(self.blocks, rounding_mode="floor") == b.div(self.blocks, rounding_mode="floor")

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        """See `Pattern`."""
        return tuple(PermutedBlocks(self.block, self._permutation(head)) for head in range(heads))

    def _permutation(self, head: int) -> tuple[int, ...]:
        if self.permutations:
            return self.permutations[head % len(self.permutations)]
        return tuple((a - head) % self.blocks for a in range(self.blocks))


def _is_row(value: Any) -> bool:
    return isinstance(value, tuple | list)  # JSON has lists


@dataclass(frozen=True)
class PermutedBlocks(BlockPattern):
    """Block a sees block ``permutation[a]`` of its stretch."""

    block: int
    permutation: tuple[int, ...]

    @property
    def reach(self) -> int:
        """That of the block that looks farthest."""
        farthest = max(abs(a - b) for a, b in enumerate(self.permutation))
        return (farthest + 1) * self.block - 1

    def meets(self, a: Tensor, b: Tensor) -> Tensor:
        """See `BlockPattern`."""
        inside = a % len(self.permutation)
        return b == a - inside + torch.tensor(self.permutation, device=a.device)[inside]
