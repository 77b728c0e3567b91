"""Longformer: sliding window, dilated in some heads, and global tokens."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.global_tokens import GlobalTokens
from rlxf.attention.patterns.window import Dilated
from rlxf.attention.technique import check_int


@dataclass(frozen=True)
class Longformer(GlobalTokens):
    """Tokens see ``window / 2`` keys on each side and themselves; global tokens see all and are seen by all.

    With dilation d, a token sees every d-th key of a window d times as long. Global tokens have separate
    projections of queries, keys and values.

    The first tokens of an episode are the global ones. In a causal transformer they only see earlier tokens;
    this form is ours, as the paper's causal form has no global tokens.

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1.

    Args:
        window: number of keys around a token, half of them on each side; even.
        dilation: distance of adjacent keys, in tokens.
        plain_heads: number of heads, the first ones, with a dilation of 1.
        global_tokens: number of global tokens.
        farthest: distance, in tokens, beyond which no token sees another; None for no bound. For an agent
            with memory, set the memory's length.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if window is odd or less than 2; if dilation, global_tokens or farthest is less than 1; or
            if plain_heads is less than 0.
    """

    paper: ClassVar[str] = "Beltagy et al. 2020, arXiv:2004.05150"
    causal_form: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L (window + global_tokens) pairs"
    window: int = 128
    dilation: int = 1
    plain_heads: int = 0
    global_tokens: int = 1
    farthest: int | None = None

    def __post_init__(self) -> None:
        check_int("Longformer window", self.window, least=2)
        check_int("Longformer dilation", self.dilation)
        check_int("Longformer plain_heads", self.plain_heads, least=0)
        super().__post_init__()
        if self.window % 2:
            raise ValueError(f"Longformer window must be even, got {self.window}")

    @property
    def local(self) -> Pattern:
        """Window of the tokens that are not global."""
        window = Dilated(self.window // 2 + 1, self.dilation, self.plain_heads)
        return window.limit_distance(self.farthest)
