"""BigBird with extra global tokens: ETC, and random blocks."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.checks import check_whole
from rlxf.attention.patterns.base import Pattern, check_global_tokens
from rlxf.attention.patterns.big_bird import NearAndRandom
from rlxf.attention.patterns.etc import ExtraTokens
from rlxf.attention.patterns.window import bounded


@dataclass(frozen=True)
class BigBirdETC(ExtraTokens):
    """A token sees the blocks around its own, some at random, and all global tokens, which see all.

    Global tokens are extra ones, with projections of their own; causal, the first ones of an episode: see
    `ExtraTokens`. Blocks are drawn as in `BigBird`; they count from the first global token,
    and blocks of only global tokens are not drawn.

    Source: Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D.

    Args:
        block: tokens of a block.
        window: blocks around a block that it sees, itself among them; odd.
        random: blocks drawn for each block.
        global_tokens: number of global tokens.
        seed: of what is drawn.
        farthest: distance, in tokens, beyond which no token sees another; None for no bound. For an agent
            with memory, the memory's length.

    Raises:
        TypeError: if one of them is no whole number.
        ValueError: if window is even, block, window, global_tokens or farthest is less than 1, or one of the
            others less than 0.
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
        check_whole("BigBirdETC block", self.block)  # global tokens are counted in blocks
        check_global_tokens(self)
        _ = self.local  # checks the other options

    @property
    def local(self) -> Pattern:
        """The window and the random blocks."""
        local = NearAndRandom(
            self.block, self.window, self.random, self.seed, self.global_tokens // self.block
        )
        return bounded(local, self.farthest)
