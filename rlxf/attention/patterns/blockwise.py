"""Blockwise attention: in each head, a block of queries attends to one block of keys."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.patterns.base import BlockPattern, Pattern, check_fits_heads
from rlxf.attention.technique import SpecView
from rlxf.utils.checks import check_int, is_tuple_or_list

MAX_BLOCKS = 2**16
"""Largest number of blocks of a permutation; permutations are stored as numbers for each head."""


@dataclass(frozen=True)
class Blockwise(BlockPattern):
    """In head h, block a of queries attends to block ``pi_h(a)`` of keys; ``pi_h`` permutes n blocks.

    The paper uses cyclic shifts. The default here is ``pi_h(a) = (a - h) mod n``: head 0 attends to the block
    of the query, head 1 the previous one, and so on. Longer sequences are divided into parts of n blocks.

    The causal form, in which later keys are masked, is rlxf's variant; the paper has none. The output of a
    head is 0 for a query without visible keys.

    Source: Qiu et al. 2020, arXiv:1911.02972, section 3.2.

    Args:
        block: tokens per block.
        blocks: n, number of blocks that are permuted.
        permutations: ``pi_h`` for heads 0, 1, ..., each with the numbers 0 ... n - 1; they repeat if there
            are more heads. Empty for cyclic shifts.

    Raises:
        TypeError: if block or blocks is not an integer, or permutations is not a tuple of tuples of integers.
        ValueError: if block or blocks is less than 1, blocks is more than 65,536, or an entry is not a
            permutation of n numbers; in a spec, if there are more permutations than heads.
    """

    paper: ClassVar[str] = "Qiu et al. 2020, arXiv:1911.02972"
    causal_form: ClassVar[str] = "rlxf's"
    cost: ClassVar[str] = "L block pairs"
    block: int = 64
    blocks: int = 8
    permutations: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_int("Blockwise block", self.block)
        check_int("Blockwise blocks", self.blocks, most=MAX_BLOCKS)
        self._check_permutations()
        object.__setattr__(
            self, "permutations", tuple(tuple(permutation) for permutation in self.permutations)
        )

    def _check_permutations(self) -> None:
        if not is_tuple_or_list(self.permutations) or not all(map(is_tuple_or_list, self.permutations)):
            raise TypeError(f"Blockwise permutations must be a tuple of tuples, got {self.permutations!r}")
        for permutation in self.permutations:
            for number in permutation:
                check_int("Blockwise permutations", number, least=0)
            if len(permutation) != self.blocks or set(permutation) != set(range(self.blocks)):
                raise ValueError(
                    f"Blockwise permutations must each contain 0 to {self.blocks - 1} once, got {permutation}"
                )

    def check(self, choices: SpecView) -> None:
        """Raise ValueError if there are more permutations than heads."""
        check_fits_heads(self, "permutations", len(self.permutations), choices.heads)

    @property
    def max_distance(self) -> int:
        """``blocks * block - 1``."""
        return self.blocks * self.block - 1

    def block_mask_mod(self, a: Tensor, b: Tensor) -> Tensor:
        """Return whether some head allows the pair; see `for_heads`."""
        return a.div(self.blocks, rounding_mode="floor") == b.div(self.blocks, rounding_mode="floor")

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        return tuple(PermutedBlocks(self.block, self._permutation(head)) for head in range(heads))

    def _permutation(self, head: int) -> tuple[int, ...]:
        if self.permutations:
            return self.permutations[head % len(self.permutations)]
        return tuple((a - head) % self.blocks for a in range(self.blocks))


@dataclass(frozen=True)
class PermutedBlocks(BlockPattern):
    """Pattern in which block a attends to block ``permutation[a]`` of its part of the sequence."""

    block: int
    permutation: tuple[int, ...]

    @property
    def max_distance(self) -> int:
        """Reach of the block whose keys are farthest away."""
        farthest = max(abs(a - b) for a, b in enumerate(self.permutation))
        return (farthest + 1) * self.block - 1

    def block_mask_mod(self, a: Tensor, b: Tensor) -> Tensor:
        inside = a % len(self.permutation)
        return b == a - inside + torch.tensor(self.permutation, device=a.device)[inside]
