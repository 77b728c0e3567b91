"""BigBird-ETC: extra global tokens as in ETC, and random blocks."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.big_bird import WindowAndRandomBlocks
from rlxf.attention.patterns.global_tokens import ExtraTokens, check_global_tokens
from rlxf.attention.patterns.window import limit_distance
from rlxf.attention.validation import check_int


@dataclass(frozen=True)
class BigBirdETC(ExtraTokens):
    """Tokens see neighboring blocks, random blocks and all global tokens; global tokens see all.

    Global tokens are extra tokens with separate projections; in a causal transformer they are the first
    tokens of an episode: see `ExtraTokens`. Blocks are drawn as in `BigBird`. They are numbered from the
    first global token, and blocks that contain only global tokens are not drawn.

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
    causal: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L (block (window + random) + global_tokens) pairs"
    block: int = 32
    window: int = 3
    random: int = 2
    global_tokens: int = 4
    seed: int = 0
    farthest: int | None = None

    def __post_init__(self) -> None:
        check_int("BigBirdETC block", self.block)  # global tokens are counted in blocks
        check_global_tokens(self)
        _ = self.local  # checks the other options

    @property
    def local(self) -> Pattern:
        """Window and random blocks."""
        local = WindowAndRandomBlocks(
            self.block, self.window, self.random, self.seed, self.global_tokens // self.block
        )
        return limit_distance(local, self.farthest)
