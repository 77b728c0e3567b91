"""Sliding window: a token sees the tokens nearest to it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlxf.attention.patterns.base import Pattern, positions_near
from rlxf.attention.validation import MAX_INT, check_int


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
        check_int("Window size", self.size, most=MAX_INT + 1)

    @property
    def max_distance(self) -> int:
        """``size - 1``."""
        return self.size - 1

    shift_period = 1  # only distances count

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether ``|i - j| < size``."""
        return (i - j).abs() < self.size

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        return positions_near(i, self.max_distance, positions)

    def within(self, window: Pattern) -> Pattern:
        return window


def limit_distance(pattern: Pattern, farthest: int | None) -> Pattern:
    """Return the pattern without keys farther away than ``farthest`` tokens; None for no bound."""
    if farthest is None or pattern.max_distance <= farthest:
        return pattern
    return pattern.within(Window(farthest + 1))
