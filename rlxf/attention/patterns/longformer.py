"""Longformer: a window, with gaps in some heads, and global tokens."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.checks import check_whole
from rlxf.attention.patterns.base import GlobalTokens, Pattern, check_global_tokens
from rlxf.attention.patterns.dilated import Dilated
from rlxf.attention.patterns.window import bounded


@dataclass(frozen=True)
class Longformer(GlobalTokens):
    """A token sees ``window / 2`` keys on each side and itself; global tokens see all and are seen by all.

    With a dilation d, each d-th key of a window d times as long. Global tokens ask by projections of their
    own, for queries, keys and values: what they ask for is something else than what is near.

    The first tokens of an episode are the global ones. In a causal transformer they see what was before them,
    as all do: ours; the paper's causal form has none.

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1.

    Args:
        window: keys around a token, half of them on each side; even.
        dilation: gap from one key to the next, in tokens.
        plain_heads: heads, the first ones, that have a dilation of 1 in any case.
        global_tokens: number of global tokens.
        farthest: distance, in tokens, beyond which no token sees another; None for no bound. For an agent
            with memory, the memory's length.

    Raises:
        TypeError: if one of them is no whole number.
        ValueError: if window is odd or less than 2, dilation, global_tokens or farthest is less than 1, or
            plain_heads less than 0.
    """

    paper: ClassVar[str] = "Beltagy et al. 2020, arXiv:2004.05150"
    causal: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L (window + global_tokens) pairs"
    window: int = 128
    dilation: int = 1
    plain_heads: int = 0
    global_tokens: int = 1
    farthest: int | None = None

    def __post_init__(self) -> None:
        check_whole("Longformer window", self.window, least=2)
        check_whole("Longformer dilation", self.dilation)
        check_whole("Longformer plain_heads", self.plain_heads, least=0)
        check_global_tokens(self)
        if self.window % 2:
            raise ValueError(f"Longformer window must be even, got {self.window}")

    @property
    def local(self) -> Pattern:
        """The window."""
        return bounded(Dilated(self.window // 2 + 1, self.dilation, self.plain_heads), self.farthest)
