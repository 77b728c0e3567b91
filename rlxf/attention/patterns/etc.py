"""ETC: global tokens attend to all tokens, and all tokens to them; other tokens have a local window."""

from dataclasses import dataclass
from typing import ClassVar

from rlxf.attention.patterns.base import Pattern
from rlxf.attention.patterns.global_tokens import ExtraTokens, GlobalInput, SegmentLengths, checked_segments
from rlxf.attention.patterns.window import Window, limit_distance
from rlxf.attention.technique import SpecView
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class ETC(ExtraTokens):
    """Global tokens attend to all tokens, and all tokens to them; others attend up to ``|i - j| <= radius``.

    Global tokens have separate projections. In a bidirectional transformer, they are added to the sequence;
    in a causal one, the first tokens of an episode serve as global tokens: see `ExtraTokens`. The paper's
    relative position labels are the position `ETCLabels`.

    Source: Ainslie et al. 2020, arXiv:2004.08483, section 3.2.

    Args:
        radius: distance, in tokens, up to which a token attends to others.
        global_tokens: number of global tokens g, or their positions in an episode as a tuple.
        farthest: distance, in tokens, beyond which no token attends to another; None for no bound. For an
            agent with memory, set the memory's length.
        global_input: global tokens of a bidirectional transformer: "learned" vectors, or "given" as the first
            tokens of an episode.
        segments: lengths of segments such that global token n attends, besides global tokens, only to
            segment n of the other tokens: one length, or that of each segment. This is the hard mask of the
            authors' code for one global token per sentence. None: global tokens attend to all tokens.

    Raises:
        TypeError: if an option is not an integer or, where allowed, a tuple of integers.
        ValueError: if radius is less than 0; if global_tokens, farthest or a length is less than 1; if a
            position is negative or given twice; or if global_input is unknown. In a spec, if segments are
            given for a causal transformer, or positions for learned global tokens.
    """

    paper: ClassVar[str] = "Ainslie et al. 2020, arXiv:2004.08483"
    causal_form: ClassVar[str] = "rlxf's"
    cost: ClassVar[str] = "L (radius + global_tokens) pairs"
    radius: int = 64
    global_tokens: int | tuple[int, ...] = 4
    farthest: int | None = None
    global_input: GlobalInput = "learned"
    segments: SegmentLengths = None

    def __post_init__(self) -> None:
        check_int("ETC radius", self.radius, least=0)
        super().__post_init__()
        object.__setattr__(self, "segments", checked_segments("ETC segments", self.segments))

    def check(self, choices: SpecView) -> None:
        """Raise ValueError if segments would have no effect, or listed positions have no tokens."""
        super().check(choices)
        if self.segments is not None and choices.causal:
            raise ValueError(
                f"{self} hides segments from global tokens, and causal=True hides all later tokens from "
                f"them; set segments=None or causal=False"
            )

    @property
    def own_segments(self) -> SegmentLengths:
        return self.segments

    @property
    def local(self) -> Pattern:
        """Window of the tokens that are not global."""
        return limit_distance(Window(self.radius + 1), self.farthest)
