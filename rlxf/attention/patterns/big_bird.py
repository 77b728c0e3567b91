"""BigBird attention patterns: window and random blocks, with global blocks (ITC) or global tokens (ETC)."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from rlxf.attention.patterns.base import UNLIMITED, BlockPattern, Either, Pattern, check_fits_heads
from rlxf.attention.patterns.global_attention import GlobalPositions, is_global
from rlxf.attention.patterns.global_tokens import ExtraTokens, GlobalInput, checked_positions
from rlxf.attention.patterns.window import limit_distance
from rlxf.attention.sparse.plan import ENTRY_BYTES, LRUCache
from rlxf.attention.technique import SpecView, layer_seed
from rlxf.utils.checks import check_choice, check_int, check_seed, is_tuple_or_list

MAX_RANDOM_BLOCKS = 2**16
"""Largest number of random blocks per block; drawn blocks are stored as numbers for each head."""

DrawSharing = Literal["shared", "layer"]
"""Random blocks: the same in all layers, or drawn for each layer."""


@dataclass(frozen=True)
class BigBird(BlockPattern):
    """Blocks attend to neighboring, random and global blocks; global blocks attend to all blocks.

    This is BigBird-ITC: existing tokens are global, here the first blocks of an episode, or listed ones. In
    the authors' code the last block is global, too; it is unknown while an episode continues. `BigBirdETC`
    adds extra global tokens.

    Each head draws for each block ``random`` different blocks that are neither global nor in its window. The
    blocks from the first non-global one to the window are divided into ``random`` ranges of nearly equal
    length, and one block is drawn from each. If fewer than ``random`` blocks precede the window, all of them
    are taken, and in a bidirectional transformer the blocks directly after the window as well. Each block
    thus attends to ``random`` drawn blocks, or as many as exist; in a causal transformer, as many as exist
    before it. The paper draws from all blocks, which requires the length; it is unknown to a rule that
    depends on positions only. All layers share one draw; with ``draw_sharing="layer"`` each layer has its
    own, as in HuggingFace's code. The draws for all blocks of an episode are made together, again if the
    number of blocks has doubled, so their time and memory grow with the length of the episode.

    ``given_blocks`` gives the blocks of sequences of n blocks in place of a draw, as in HuggingFace's code
    for a fixed length: the last ``global_blocks`` of these n blocks are global as well, unless
    ``global_blocks`` is a tuple. Blocks after the first n attend to their window and the global blocks.

    Source: Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D.

    Args:
        block: tokens per block.
        window: number of blocks in the window around a block, including itself; odd.
        random: number of blocks drawn for each block.
        global_blocks: number of global blocks at the start of an episode, or the numbers of the global
            blocks, from 0, as a tuple.
        seed: seed of the draws.
        draw_sharing: whether all layers have the same random blocks ("shared"), or each has its own
            ("layer").
        given_blocks: for heads 0, 1, ... and for each of n blocks, the numbers of the blocks that it attends
            to; they repeat if there are more heads. Empty for random draws.

    Raises:
        TypeError: if an option is not an integer or, where allowed, a tuple of integers, or given_blocks is
            not a tuple of tuples of tuples.
        ValueError: if window is even, block or window is less than 1, another option is less than 0, a global
            block is given twice, random is more than 65,536, draw_sharing is unknown, or given_blocks does
            not fit the other options; in a spec, if given_blocks is for more heads.
    """

    paper: ClassVar[str] = "Zaheer et al. 2020, arXiv:2007.14062"
    causal_form: ClassVar[str] = "rlxf's"
    cost: ClassVar[str] = "L block (window + random + global_blocks) pairs"
    block: int = 32
    window: int = 3
    random: int = 2
    global_blocks: int | tuple[int, ...] = 1
    seed: int = 0
    draw_sharing: DrawSharing = "shared"
    given_blocks: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        check_given_blocks(self.given_blocks)
        given = tuple(tuple(tuple(blocks) for blocks in head) for head in self.given_blocks)  # JSON has lists
        object.__setattr__(self, "given_blocks", given)
        if isinstance(self.global_blocks, list | tuple):
            blocks = checked_positions(self.global_blocks, "BigBird global_blocks", "block")
            object.__setattr__(self, "global_blocks", blocks)
        else:
            check_int("BigBird global_blocks", self.global_blocks, least=0)
        _ = self.local
        check_choice("BigBird draw_sharing", self.draw_sharing, get_args(DrawSharing))
        self._check_given_blocks()

    def _check_given_blocks(self) -> None:
        """Raise ValueError unless `given_blocks` fits the other options."""
        if self.given_blocks and self.draw_sharing != "shared":
            raise ValueError(
                f"BigBird given_blocks={self.given_blocks} is given for all layers; set draw_sharing='shared'"
            )
        if len({len(head) for head in self.given_blocks}) > 1:
            raise ValueError(
                f"BigBird given_blocks must have the same number of blocks for each head, got "
                f"{self.given_blocks}"
            )
        for row in (row for head in self.given_blocks for row in head):
            if len(row) > self.random or len(set(row)) < len(row) or set(row) - set(range(self._blocks)):
                raise ValueError(
                    f"BigBird given_blocks must have at most random={self.random} different numbers from "
                    f"0 to {self._blocks - 1} for each block, got {row}"
                )

    def check(self, choices: SpecView) -> None:
        """Raise ValueError if `given_blocks` is for more heads than the transformer has."""
        check_fits_heads(self, "entries of given_blocks", len(self.given_blocks), choices.heads)

    @property
    def _blocks(self) -> int:
        """Number n of blocks of `given_blocks`; 0 without it."""
        return len(self.given_blocks[0]) if self.given_blocks else 0

    @property
    def local(self) -> "WindowAndRandomBlocks":
        """Window and random blocks."""
        return WindowAndRandomBlocks(
            self.block,
            self.window,
            self.random,
            self.seed,
            self.global_blocks,
            given_blocks=self.given_blocks,
        )

    @property
    def _everywhere(self) -> "GlobalBlocks":
        return GlobalBlocks(self.block, self.global_blocks, self._blocks)

    @property
    def max_distance(self) -> int:
        """`UNLIMITED`, or the reach of the window if there are no other blocks."""
        return UNLIMITED if self.global_blocks else self.local.max_distance

    def block_mask_mod(self, a: Tensor, b: Tensor) -> Tensor:
        """Apply the rule of head 0; each head draws its own blocks."""
        return self._everywhere.block_mask_mod(a, b) | self.local.block_mask_mod(a, b)

    def for_layer(self, layer: int) -> Pattern:
        return for_layer_draws(self, layer)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        return tuple(Either(local, self._everywhere) for local in self.local.for_heads(heads))


@dataclass(frozen=True)
class BigBirdETC(ExtraTokens):
    """Tokens attend to neighboring blocks, random blocks and global tokens; global tokens to all tokens.

    Global tokens have separate projections. In a bidirectional transformer, they are added to the sequence;
    in a causal one, the first tokens of an episode serve as global tokens: see `ExtraTokens`. Blocks are
    drawn as in `BigBird`. They are numbered from the first global token, and blocks that contain only global
    tokens are not drawn.

    Source: Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D.

    Args:
        block: tokens per block.
        window: number of blocks in the window around a block, including itself; odd.
        random: number of blocks drawn for each block.
        global_tokens: number of global tokens, or their positions in an episode as a tuple.
        seed: seed of the draws.
        farthest: distance, in tokens, beyond which no token attends to another; None for no bound. For an
            agent with memory, set the memory's length.
        draw_sharing: whether all layers have the same random blocks ("shared"), or each has its own
            ("layer").
        global_input: global tokens of a bidirectional transformer: "learned" vectors, or "given" as the first
            tokens of an episode.

    Raises:
        TypeError: if an option is not an integer or, where allowed, a tuple of integers.
        ValueError: if window is even; if block, window, global_tokens or farthest is less than 1; if another
            option is less than 0; if a position is given twice; or if draw_sharing or global_input is
            unknown. In a spec, if positions are given for learned global tokens.
    """

    paper: ClassVar[str] = "Zaheer et al. 2020, arXiv:2007.14062"
    causal_form: ClassVar[str] = "rlxf's"
    cost: ClassVar[str] = "L (block (window + random) + global_tokens) pairs"
    block: int = 32
    window: int = 3
    random: int = 2
    global_tokens: int | tuple[int, ...] = 4
    seed: int = 0
    farthest: int | None = None
    draw_sharing: DrawSharing = "shared"
    global_input: GlobalInput = "learned"

    def __post_init__(self) -> None:
        check_int("BigBirdETC block", self.block)  # global tokens are counted in blocks
        check_choice("BigBirdETC draw_sharing", self.draw_sharing, get_args(DrawSharing))
        super().__post_init__()
        _ = self.local  # checks the other options

    def for_layer(self, layer: int) -> Pattern:
        return for_layer_draws(self, layer)

    @property
    def local(self) -> Pattern:
        """Window and random blocks."""
        local = WindowAndRandomBlocks(self.block, self.window, self.random, self.seed, self._global_blocks)
        return limit_distance(local, self.farthest)

    @property
    def _global_blocks(self) -> GlobalPositions:
        """Blocks that contain only global tokens."""
        if isinstance(self.global_tokens, int):
            return self.global_tokens // self.block
        tokens = Counter(position // self.block for position in self.global_tokens)
        return tuple(block for block, count in tokens.items() if count == self.block) or 0


def check_given_blocks(given_blocks: Any) -> None:
    """Check that the option `given_blocks` is a tuple of tuples of tuples of integers that are at least 0.

    Raises:
        TypeError: if it has another structure.
        ValueError: if an integer is negative.
    """
    rows = [given_blocks, *(given_blocks if is_tuple_or_list(given_blocks) else ())]
    rows += [row for head in rows[1:] if is_tuple_or_list(head) for row in head]
    if not all(map(is_tuple_or_list, rows)):
        raise TypeError(f"BigBird given_blocks must be a tuple of tuples of tuples, got {given_blocks!r}")
    for number in (number for head in given_blocks for row in head for number in row):
        check_int("BigBird given_blocks", number, least=0)


def for_layer_draws(pattern: "BigBird | BigBirdETC", layer: int) -> Pattern:
    """Return the pattern of a layer: with ``draw_sharing="layer"``, layers have consecutive seeds."""
    if pattern.draw_sharing == "shared":
        return pattern
    return replace(pattern, seed=layer_seed(pattern.seed, layer), draw_sharing="shared")


@dataclass(frozen=True)
class GlobalBlocks(BlockPattern):
    """Pattern in which the first blocks of an episode attend to all blocks, and all blocks to them.

    If the number of blocks is known, the last ``blocks`` of these ``total`` blocks are global as well;
    ``total`` is 0 if it is unknown. If ``blocks`` is a tuple of block numbers, only these are global.
    """

    block: int
    blocks: GlobalPositions
    total: int

    def block_mask_mod(self, a: Tensor, b: Tensor) -> Tensor:
        return self._is_global(a) | self._is_global(b)

    def _is_global(self, a: Tensor) -> Tensor:
        if not isinstance(self.blocks, int):
            return is_global(a, self.blocks)
        first = a < self.blocks
        return first | (a >= self.total - self.blocks) & (a < self.total) if self.total else first


@dataclass(frozen=True)
class WindowAndRandomBlocks(BlockPattern):
    """Window around a block, and blocks that a head draws among the non-global ones; see `BigBird`."""

    block: int
    window: int
    random: int
    seed: int
    global_blocks: GlobalPositions
    head: int = 0
    given_blocks: tuple[tuple[tuple[int, ...], ...], ...] = ()

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


def _bytes_of_draw(drawn: Tensor) -> int:
    return ENTRY_BYTES + drawn.nbytes


@partial(LRUCache[Tensor], size=_bytes_of_draw)
def _draw_blocks(rule: WindowAndRandomBlocks, blocks: int) -> Tensor:
    """Draw ``random`` block numbers for each of the first ``blocks`` blocks, (blocks, random) int64.

    If fewer than ``random`` blocks precede the window, the others are those directly after it.
    """
    if rule.given_blocks:
        return _given_blocks(rule, blocks)
    a, number = torch.arange(blocks)[:, None], torch.arange(rule.random)
    near = rule.window // 2
    before, after = (_count_non_global(block, rule.global_blocks) for block in (a - near, a + near + 1))
    start, end = number * before // rule.random, (number + 1) * before // rule.random
    chosen = start + (hash_uniform(rule.seed, rule.head, number, a) * (end - start)).long()
    missing = end == start
    return _non_global_block(torch.where(missing, after + missing.cumsum(1) - 1, chosen), rule.global_blocks)


def _count_non_global(block: Tensor, global_blocks: GlobalPositions) -> Tensor:
    """Return the number of blocks before ``block`` (...) that are not global."""
    block = block.clamp(min=0)
    if isinstance(global_blocks, int):
        return (block - global_blocks).clamp(min=0)
    return block - torch.searchsorted(torch.tensor(global_blocks), block)


def _non_global_block(number: Tensor, global_blocks: GlobalPositions) -> Tensor:
    """Return block ``number`` (...), from 0, of those that are not global."""
    if isinstance(global_blocks, int):
        return number + global_blocks
    for block in global_blocks:  # in ascending order
        number = number + (number >= block)
    return number


def _given_blocks(rule: WindowAndRandomBlocks, blocks: int) -> Tensor:
    """Return the blocks that the option `given_blocks` gives, (blocks, random) int64, with -1 for none."""
    rows = rule.given_blocks[rule.head % len(rule.given_blocks)][:blocks]
    chosen = torch.full((blocks, rule.random), -1)
    for block, row in enumerate(rows):
        chosen[block, : len(row)] = torch.tensor(row, dtype=torch.long)
    return chosen


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
