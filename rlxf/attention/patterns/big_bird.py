"""BigBird attention patterns: window and random blocks, with global blocks (ITC) or global tokens (ETC)."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.patterns.base import UNLIMITED, BlockPattern, Either, Pattern
from rlxf.attention.patterns.global_tokens import ExtraTokens
from rlxf.attention.technique import check_int, check_seed

MAX_RANDOM_BLOCKS = 2**16
"""Largest number of random blocks per block; drawn blocks are stored as numbers for each head."""


@dataclass(frozen=True)
class BigBird(BlockPattern):
    """Blocks see neighboring, random and global blocks; global blocks see all and are seen by all.

    This is BigBird-ITC: existing tokens are global, here the first blocks of an episode. In the authors' code
    the last block is global, too; it is unknown while an episode continues. `BigBirdETC` adds extra global
    tokens.

    Each head draws for each block ``random`` different blocks that are neither global nor in its window. The
    blocks from the first non-global one to the window are divided into ``random`` ranges of equal length, and
    one block is drawn from each. If fewer than ``random`` blocks precede the window, all of them are taken,
    and in a bidirectional transformer the blocks directly after the window as well. Each block thus attends
    to ``random`` drawn blocks, or as many as exist; in a causal transformer, as many as exist before it. The
    paper draws from all blocks, which requires the length; a rule on positions does not have it. All layers
    share one draw; in HuggingFace's code each layer has its own.

    Source: Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D.

    Args:
        block: tokens per block.
        window: number of blocks in the window around a block, including itself; odd.
        random: number of blocks drawn for each block.
        global_blocks: number of global blocks at the start of an episode.
        seed: seed of the draws.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if window is even, block or window is less than 1, another option is less than 0, or
            random is more than 65,536.
    """

    paper: ClassVar[str] = "Zaheer et al. 2020, arXiv:2007.14062"
    causal_form: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L block (window + random + global_blocks) pairs"
    block: int = 32
    window: int = 3
    random: int = 2
    global_blocks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self.local
        check_int("BigBird global_blocks", self.global_blocks, least=0)

    @property
    def local(self) -> "WindowAndRandomBlocks":
        """Window and random blocks."""
        return WindowAndRandomBlocks(self.block, self.window, self.random, self.seed, self.global_blocks)

    @property
    def max_distance(self) -> int:
        """`UNLIMITED`, or the reach of the window if there are no other blocks."""
        return UNLIMITED if self.global_blocks else self.local.max_distance

    def block_mask_mod(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the rule of head 0; other heads draw other blocks."""
        everywhere = GlobalBlocks(self.block, self.global_blocks)
        return everywhere.block_mask_mod(a, b) | self.local.block_mask_mod(a, b)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        everywhere = GlobalBlocks(self.block, self.global_blocks)
        return tuple(Either(local, everywhere) for local in self.local.for_heads(heads))


@dataclass(frozen=True)
class BigBirdETC(ExtraTokens):
    """Tokens see neighboring blocks, random blocks and all global tokens; global tokens see all.

    Global tokens have separate projections. In a bidirectional transformer, they are added to the sequence;
    in a causal one, the first tokens of an episode serve as global tokens: see `ExtraTokens`. Blocks are
    drawn as in `BigBird`. They are numbered from the first global token, and blocks that contain only global
    tokens are not drawn.

    Source: Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D.

    Args:
        block: tokens per block.
        window: number of blocks in the window around a block, including itself; odd.
        random: number of blocks drawn for each block.
        global_tokens: number of global tokens.
        seed: seed of the draws.
        farthest: distance, in tokens, beyond which no token sees another; None for no bound. For an agent
            with memory, set the memory's length.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if window is even; if block, window, global_tokens or farthest is less than 1; or if
            another option is less than 0.
    """

    paper: ClassVar[str] = "Zaheer et al. 2020, arXiv:2007.14062"
    causal_form: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L (block (window + random) + global_tokens) pairs"
    block: int = 32
    window: int = 3
    random: int = 2
    global_tokens: int = 4
    seed: int = 0
    farthest: int | None = None

    def __post_init__(self) -> None:
        check_int("BigBirdETC block", self.block)  # global tokens are counted in blocks
        super().__post_init__()
        _ = self.local  # checks the other options

    @property
    def local(self) -> Pattern:
        """Window and random blocks."""
        local = WindowAndRandomBlocks(
            self.block, self.window, self.random, self.seed, self.global_tokens // self.block
        )
        return local.limit_distance(self.farthest)


@dataclass(frozen=True)
class GlobalBlocks(BlockPattern):
    """The first blocks of an episode see all blocks and are seen by all."""

    block: int
    blocks: int

    def block_mask_mod(self, a: Tensor, b: Tensor) -> Tensor:
        return (a < self.blocks) | (b < self.blocks)


@dataclass(frozen=True)
class WindowAndRandomBlocks(BlockPattern):
    """Window around a block, and blocks that a head draws among the non-global ones; see `BigBird`."""

    block: int
    window: int
    random: int
    seed: int
    global_blocks: int
    head: int = 0

    def __post_init__(self) -> None:
        check_int("BigBird block", self.block)
        check_int("BigBird window", self.window)
        check_int("BigBird random", self.random, least=0, most=MAX_RANDOM_BLOCKS)
        check_seed("BigBird seed", self.seed)
        if self.window % 2 == 0:
            raise ValueError(f"BigBird window must be odd, got {self.window}")

    @property
    def max_distance(self) -> int:
        """`UNLIMITED`, or the reach of the window if no blocks are drawn."""
        return UNLIMITED if self.random else (self.window // 2 + 1) * self.block - 1

    def block_mask_mod(self, a: Tensor, b: Tensor) -> Tensor:
        near = (a - b).abs() <= self.window // 2
        return near | self._is_drawn(a, b) if self.random else near

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        return (self,) if self.random == 0 else tuple(replace(self, head=head) for head in range(heads))

    def _is_drawn(self, a: Tensor, b: Tensor) -> Tensor:
        """Return whether block b is drawn for block a."""
        last = int(a.max()) if a.numel() else 0
        chosen = _draw_blocks(self, 1 << last.bit_length()).to(a.device)
        return (chosen[a] == b[..., None]).any(-1)


@lru_cache(maxsize=64)
def _draw_blocks(rule: WindowAndRandomBlocks, blocks: int) -> Tensor:
    """Draw (blocks, random) int64 blocks for each of the first blocks.

    If fewer than ``random`` blocks precede the window, the others are those directly after it.
    """
    a, number = torch.arange(blocks)[:, None], torch.arange(rule.random)
    near, first = rule.window // 2, rule.global_blocks
    before = (a - near - first).clamp(min=0)
    start, end = number * before // rule.random, (number + 1) * before // rule.random
    chosen = first + start + (hash_uniform(rule.seed, rule.head, number, a) * (end - start)).long()
    missing = end == start
    return torch.where(missing, (a + near).clamp(min=first - 1) + missing.cumsum(1), chosen)


def hash_uniform(seed: int, *numbers: Tensor | int) -> Tensor:
    """Return a uniform number in [0, 1) for each tuple of integers, float64; they broadcast.

    Multiplications and shifts mix all bits, as in SplitMix64.

    Source: Steele et al. 2014, "Fast splittable pseudorandom number generators", section 5.
    """
    state = torch.tensor(seed)
    for number in numbers:
        state = _mixed(state + torch.as_tensor(number) * -7046029254386353131 + 1)
    return (state & (2**63 - 1)).double() / 2.0**63


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of x int64; overflow is intended."""
    x = (x ^ _right(x, 30)) * -4658895280553007687
    x = (x ^ _right(x, 27)) * -7723592293110705685
    return x ^ _right(x, 31)


def _right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
