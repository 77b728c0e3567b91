"""ETC: a few global tokens see all and are seen by all, the others see what is near."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.checks import check_whole
from rlxf.attention.patterns.base import GlobalTokens, Pattern, check_global_tokens
from rlxf.attention.patterns.window import Window, bounded


class ExtraTokens(GlobalTokens):
    """Global tokens with keys and values of their own for each pair of sides, and extra ones where possible.

    Tokens and global tokens each have queries and an output of their own, and each project the keys and
    values of both: four pairs of projections. One softmax goes over all keys of a query.

    In a bidirectional transformer the global tokens are extra ones: learned vectors at the positions 0 to
    g - 1 of each episode, whose own tokens stand behind them. In a causal one such tokens would see nothing,
    or what is ahead. There the first g tokens of an episode are the global ones: ours.
    """


@dataclass(frozen=True)
class ETC(ExtraTokens):
    """Global tokens see all and are seen by all; other tokens see those with ``|i - j| <= radius``.

    Global tokens are extra ones, with projections of their own; causal, the first ones of an episode: see
    `ExtraTokens`. The paper's labels for the relation of two tokens are the position `ETCLabels`.

    Source: Ainslie et al. 2020, arXiv:2004.08483, section 3.2.

    Args:
        radius: distance, in tokens, up to which a token sees others.
        global_tokens: number of global tokens g.
        farthest: distance, in tokens, beyond which no token sees another; None for no bound. For an agent
            with memory, the memory's length.

    Raises:
        TypeError: if one of them is no whole number.
        ValueError: if radius is less than 0, or global_tokens or farthest less than 1.
    """

    paper: ClassVar[str] = "Ainslie et al. 2020, arXiv:2004.08483"
    causal: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L (radius + global_tokens) pairs"
    radius: int = 64
    global_tokens: int = 4
    farthest: int | None = None

    def __post_init__(self) -> None:
        check_whole("ETC radius", self.radius, least=0)
        check_global_tokens(self)

    @property
    def local(self) -> Pattern:
        """The window."""
        return bounded(Window(self.radius + 1), self.farthest)
