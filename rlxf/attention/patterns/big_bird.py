"""BigBird: a window, a few random blocks, and global blocks."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.checks import check_seed, check_whole
from rlxf.attention.patterns.base import UNLIMITED, BlockPattern, Either, Pattern
from rlxf.attention.patterns.draws import draw

MOST_DRAWN = 2**16
"""Blocks that a block may draw: they are held as numbers, for each head."""


@dataclass(frozen=True)
class BigBird(BlockPattern):
    """A block sees those around it, some at random, and the global ones, which see all and are seen by all.

    This is ITC: existing tokens are global, here the first blocks of an episode. In the authors' code the
    last one is, too; while an episode goes on, nobody knows it. `BigBirdETC` has extra tokens.

    Each head draws for each block ``random`` different blocks that are neither global nor in its window: one
    from each of as many stretches of equal length, from the first block that is not global to the window.
    Where fewer blocks stand before the window, all of them are taken, and in a bidirectional transformer the
    ones directly after the window as well. So each block attends to ``random`` drawn blocks, or as many as
    exist; in a causal transformer, as many as exist before it. The paper draws from all blocks. That requires
    the length, which a rule on positions does not have. All layers have the same draw; in HuggingFace's code
    each has its own.

    Source: Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D.

    Args:
        block: tokens of a block.
        window: blocks around a block that it sees, itself among them; odd.
        random: blocks drawn for each block.
        global_blocks: blocks at the start that see all and are seen by all.
        seed: of what is drawn.

    Raises:
        TypeError: if one of them is no whole number.
        ValueError: if window is even, block or window is less than 1, one of the others less than 0, or
            random more than 65,536.
    """

    paper: ClassVar[str] = "Zaheer et al. 2020, arXiv:2007.14062"
    causal: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L block (window + random + global_blocks) pairs"
    block: int = 32
    window: int = 3
    random: int = 2
    global_blocks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self.local
        check_whole("BigBird global_blocks", self.global_blocks, least=0)

    @property
    def local(self) -> "NearAndRandom":
        """The window and the random blocks."""
        return NearAndRandom(self.block, self.window, self.random, self.seed, self.global_blocks)

    @property
    def reach(self) -> int:
        """No bound, unless the window is all."""
        return UNLIMITED if self.global_blocks else self.local.reach

    def meets(self, a: Tensor, b: Tensor) -> Tensor:
        """As head 0 does; others draw other blocks."""
        return (a < self.global_blocks) | (b < self.global_blocks) | self.local.meets(a, b)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        """See `Pattern`."""
        everywhere = FirstBlocks(self.block, self.global_blocks)
        return tuple(Either(local, everywhere) for local in self.local.for_heads(heads))


@dataclass(frozen=True)
class NearAndRandom(BlockPattern):
    """Blocks around a block, and the blocks drawn for it after the global ones; see `BigBird`."""

    block: int
    window: int
    random: int
    seed: int
    global_blocks: int

    def __post_init__(self) -> None:
        check_whole("BigBird block", self.block)
        check_whole("BigBird window", self.window)
        check_whole("BigBird random", self.random, least=0, most=MOST_DRAWN)
        check_seed("BigBird seed", self.seed)
        if self.window % 2 == 0:
            raise ValueError(f"BigBird window must be odd, got {self.window}")

    @property
    def reach(self) -> int:
        """No bound, unless nothing is drawn."""
        return UNLIMITED if self.random else (self.window // 2 + 1) * self.block - 1

    def meets(self, a: Tensor, b: Tensor) -> Tensor:
        """As head 0 does."""
        return DrawnByHead(self, 0).meets(a, b) if self.random else self.near(a, b)

    def near(self, a: Tensor, b: Tensor) -> Tensor:
        """The window."""
        return (a - b).abs() <= self.window // 2

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        """See `Pattern`."""
        return (self,) if self.random == 0 else tuple(DrawnByHead(self, head) for head in range(heads))


@dataclass(frozen=True)
class DrawnByHead(BlockPattern):
    """What a head sees by a `NearAndRandom`."""

    of: NearAndRandom
    head: int

    @property
    def block(self) -> int:  # type: ignore[override]
        """Tokens of a block."""
        return self.of.block

    @property
    def reach(self) -> int:
        """No bound."""
        return UNLIMITED

    def meets(self, a: Tensor, b: Tensor) -> Tensor:
        """See `BlockPattern`."""
        return self.of.near(a, b) | self._drew(a, b)

    def _drew(self, a: Tensor, b: Tensor) -> Tensor:
        """Whether block a drew block b."""
        last = int(a.max()) if a.numel() else 0
        chosen = drawn(self.of, self.head, 1 << last.bit_length()).to(a.device)
        return (chosen[a] == b[..., None]).any(-1)


@lru_cache(maxsize=64)
def drawn(rule: NearAndRandom, head: int, blocks: int) -> Tensor:
    """Draw (blocks, random) int64 blocks for each of the first blocks.

    Where fewer than ``random`` stand before the window, the others are those directly after it.
    """
    a, number = torch.arange(blocks)[:, None], torch.arange(rule.random)
    near, first = rule.window // 2, rule.global_blocks
    before = (a - near - first).clamp(min=0)
    start, end = number * before // rule.random, (number + 1) * before // rule.random
    chosen = first + start + (draw(rule.seed, head, number, a) * (end - start)).long()
    missing = end == start
    return torch.where(missing, (a + near).clamp(min=first - 1) + missing.cumsum(1), chosen)


@dataclass(frozen=True)
class FirstBlocks(BlockPattern):
    """The first blocks of an episode see all and are seen by all."""

    block: int
    blocks: int

    @property
    def reach(self) -> int:
        """No bound."""
        return UNLIMITED

    def meets(self, a: Tensor, b: Tensor) -> Tensor:
        """See `BlockPattern`."""
        return (a < self.blocks) | (b < self.blocks)
