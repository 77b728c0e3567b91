"""ETC: a few global tokens see all tokens and are seen by all; other tokens have a local window."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.patterns.base import GlobalTokens, Pattern, check_global_tokens
from rlxf.attention.patterns.window import Window, limit_distance
from rlxf.attention.validation import check_int


class ExtraTokens(GlobalTokens):
    """Pattern with extra global tokens and separate keys and values for global and other tokens.

    Global tokens and other tokens each have their own queries and outputs, and each project the keys and
    values of both: four pairs of projections. One softmax covers all keys of a query.

    In a bidirectional transformer the global tokens are extra learned vectors. They have the positions 0 to g
    - 1 of each episode, and the tokens of the episode follow them. In a causal transformer they would see
    either nothing or later tokens. There the first g tokens of an episode are the global ones; this form is
    ours.
    """


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
