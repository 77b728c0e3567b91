"""ETC: a few global tokens see all tokens and are seen by all; other tokens have a local window."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.patterns.base import Pattern, Window
from rlxf.attention.patterns.global_tokens import ExtraTokens
from rlxf.attention.technique import check_int


@dataclass(frozen=True)
class ETC(ExtraTokens):
    """Global tokens see all and are seen by all; other tokens see those with ``|i - j| <= radius``.

    Global tokens have separate projections. In a bidirectional transformer, they are added to the sequence;
    in a causal one, the first tokens of an episode serve as global tokens: see `ExtraTokens`. The paper's
    relative position labels are the position `ETCLabels`.

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
    causal_form: ClassVar[str] = "ours"
    cost: ClassVar[str] = "L (radius + global_tokens) pairs"
    radius: int = 64
    global_tokens: int = 4
    farthest: int | None = None

    def __post_init__(self) -> None:
        check_int("ETC radius", self.radius, least=0)
        super().__post_init__()

    @property
    def local(self) -> Pattern:
        """Window of the tokens that are not global."""
        return Window(self.radius + 1).limit_distance(self.farthest)
