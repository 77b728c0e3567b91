"""Dilated sliding window: every d-th token around the query."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.patterns.base import GROUP_SIZE, Pattern, positions_near
from rlxf.attention.validation import check_int


@dataclass(frozen=True)
class Dilated(Pattern):
    """Query i sees key j if ``|i - j| < size * dilation`` and ``dilation`` divides ``i - j``.

    A query sees ``size`` keys on each side, including itself. The window reaches ``dilation`` times as far as
    `Window` at the same cost.

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1 (there w/2 on each side).

    Args:
        size: number of keys on each side, including the query itself; at least 1.
        dilation: distance of adjacent keys, in tokens; 1 is `Window`.
        plain_heads: number of heads, the first ones, with a dilation of 1.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if size or dilation is less than 1, or plain_heads is less than 0.
    """

    paper: ClassVar[str] = "Beltagy et al. 2020, arXiv:2004.05150"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L size pairs"
    size: int = 65
    dilation: int = 2
    plain_heads: int = 0

    def __post_init__(self) -> None:
        check_int("Dilated size", self.size)
        check_int("Dilated dilation", self.dilation)
        check_int("Dilated plain_heads", self.plain_heads, least=0)

    @property
    def max_distance(self) -> int:
        """``(size - 1) * dilation``."""
        return (self.size - 1) * self.dilation

    shift_period = 1  # only distances count

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the rule of a dilated head."""
        return ((i - j).abs() <= self.max_distance) & ((i - j) % self.dilation == 0)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        if self.plain_heads == 0:
            return (self,)
        gaps, plain = Dilated(self.size, self.dilation), Dilated(self.size, 1)
        return tuple(plain if head < self.plain_heads else gaps for head in range(heads))

    def group(self, i: Tensor) -> Tensor:
        """Return groups of queries with the same remainder of i / dilation, which see the same keys."""
        return i.div(GROUP_SIZE * self.dilation, rounding_mode="floor") * self.dilation + i % self.dilation

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        near = positions_near(i, self.max_distance, positions)
        return near[torch.isin(near % self.dilation, (i % self.dilation).unique())]
