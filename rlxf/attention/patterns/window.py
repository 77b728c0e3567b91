"""Sliding window: a token sees the tokens nearest to it."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from torch import Tensor

from rlxf.attention.checks import MOST, check_whole
from rlxf.attention.patterns.base import GlobalTokens, Pattern, between
from rlxf.attention.patterns.full import Full


@dataclass(frozen=True)
class Window(Pattern):
    """Query i sees key j if ``|i - j| < size``.

    In a causal transformer a query sees ``size`` keys, including itself; a transformer of n layers has a
    receptive field of n * (size - 1) earlier tokens. With a memory of M tokens, ``Window(M + 1)`` gives every
    query the same reach, at any place in its segment.

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1 (there w/2 on each side).

    Args:
        size: distance in tokens, at least 1, from which keys are hidden.

    Raises:
        TypeError: if size is not an integer.
        ValueError: if size is less than 1.
    """

    paper: ClassVar[str] = "Beltagy et al. 2020, arXiv:2004.05150"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L size pairs"
    size: int = 129

    def __post_init__(self) -> None:
        check_whole("Window size", self.size, most=MOST + 1)

    @property
    def reach(self) -> int:
        """``size - 1``."""
        return self.size - 1

    @property
    def period(self) -> int:
        """Always 1: only distances count."""
        return 1

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether ``|i - j| < size``."""
        return (i - j).abs() < self.size

    def keys(self, i: Tensor, among: Tensor) -> Tensor:
        return between(int(i.min()) - self.reach, int(i.max()) + self.reach, among)


def bounded(pattern: Pattern, farthest: int | None) -> Pattern:
    """Return the pattern without keys farther away than ``farthest`` tokens; None for no bound."""
    if farthest is None or pattern.reach <= farthest:
        return pattern
    if isinstance(pattern, GlobalTokens):
        options: Any = pattern
        return cast(Pattern, replace(options, farthest=farthest))
    window = Window(farthest + 1)
    return window if isinstance(pattern, Full | Window) else pattern & window
