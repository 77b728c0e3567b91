"""ETC: a few global tokens see all tokens and are seen by all; other tokens have a local window."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.global_tokens import ExtraTokens, check_global_tokens
from rlxf.attention.patterns.window import Window, limit_distance
from rlxf.attention.validation import check_int


@dataclass(frozen=True)
class ETC(ExtraTokens):
    """Global tokens see all and are seen by all; other tokens see those with ``|i - j| <= radius``.

    Global tokens are extra tokens with separate projections; in a causal transformer they are the first
    tokens of an episode: see `ExtraTokens`. The paper's relative position labels are the position
    `ETCLabels`.

    Source: Ainslie et al. 2020, arXiv:2004.08483, section 3.2.

    Args:
        radius: distance, in tokens, up to which a token sees others.
        global_tokens: number of global tokens g.
        farthest: distance, in tokens, beyond which no token sees another; None for no bound. For an agent
            with memory, set the memory's length.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if radius is less than 0, or global_tokens or farthest is less than 1.
    """

    paper: ClassVar[str] = "Ainslie et al. 2020, arXiv:2004.08483"
    causal: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L (radius + global_tokens) pairs"
    radius: int = 64
    global_tokens: int = 4
    farthest: int | None = None

    def __post_init__(self) -> None:
        check_int("ETC radius", self.radius, least=0)
        check_global_tokens(self)

    @property
    def local(self) -> Pattern:
        """Window of the tokens that are not global."""
        return limit_distance(Window(self.radius + 1), self.farthest)
