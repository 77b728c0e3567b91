"""Patterns `Full`, `Window` and `Dilated`, and the columns of strided patterns."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.patterns.base import (
    GROUP_SIZE,
    ByLayer,
    Pattern,
    check_has_layers,
    checked_by_layer,
    number_in_layer,
    numbers_by_layer,
    positions_near,
)
from rlxf.attention.technique import SpecView
from rlxf.utils.checks import MAX_INT, check_int


@dataclass(frozen=True)
class Full(Pattern):
    """Every key is visible: the cost grows with the square of the length.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
    """

    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L^2 pairs"

    shift_period = 1  # only distances count

    allows_all_keys = is_uniform_window = True

    def within(self, distance: int) -> Pattern:
        return Window(distance + 1)

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return True for every pair."""
        return torch.ones((), dtype=torch.bool, device=i.device)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        """Return all keys."""
        return positions


@dataclass(frozen=True)
class Window(Pattern):
    """Query i attends to key j if ``|i - j| < size``.

    In a causal transformer a query attends to ``size`` keys, including itself; a transformer of n layers has
    a receptive field of n * (size - 1) earlier tokens. With a memory of M tokens, ``Window(M + 1)`` gives
    every query the same reach, at any place in its segment.

    With several sizes, windows differ by layer; in the paper they grow: ``Window((17, 33, 65))`` has a small
    window in the first layer, for local information, and a large one in the last. Further layers start again
    with the first size, so ``Window((9, 129))`` alternates.

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1 (there w/2 on each side); section 4.1 for
    windows by layer.

    Args:
        size: distance in tokens, at least 1, from which keys are hidden; a tuple of sizes repeats over
            the layers.

    Raises:
        TypeError: if size is not an integer or a tuple of integers.
        ValueError: if size is less than 1 or empty; in a spec, if there are more sizes than layers.
    """

    paper: ClassVar[str] = "Beltagy et al. 2020, arXiv:2004.05150"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L size pairs"
    size: ByLayer = 129

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", checked_by_layer("Window size", self.size, most=MAX_INT + 1))

    def check(self, choices: SpecView) -> None:
        """Raise ValueError if there are more sizes than layers."""
        check_has_layers(self, "size", self.size, choices)

    @property
    def max_distance(self) -> int:
        """``size - 1``, with the largest size."""
        return max(numbers_by_layer(self.size)) - 1

    shift_period = 1  # only distances count

    @property
    def is_uniform_window(self) -> bool:
        """True for a single size."""
        return isinstance(self.size, int)

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether ``|i - j| < size``, with the largest size."""
        return (i - j).abs() <= self.max_distance

    def for_layer(self, layer: int) -> Pattern:
        return replace(self, size=number_in_layer(self.size, layer))

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        return positions_near(i, self.max_distance, positions)

    def within(self, distance: int) -> Pattern:
        sizes = tuple(min(size, distance + 1) for size in numbers_by_layer(self.size))
        return replace(self, size=sizes[0] if len(set(sizes)) == 1 else sizes)


def limit_distance(pattern: Pattern, farthest: int | None) -> Pattern:
    """Return a pattern without keys farther away than ``farthest`` tokens; None for no bound."""
    if farthest is None or pattern.max_distance <= farthest:
        return pattern
    limited = pattern.within(farthest)
    return pattern & Window(farthest + 1) if limited is None else limited


@dataclass(frozen=True)
class Dilated(Pattern):
    """Query i attends to key j if ``|i - j| < size * dilation`` and ``dilation`` divides ``i - j``.

    A query attends to ``size`` keys on each side, including itself. The window reaches ``dilation`` times as
    far as `Window` at the same cost.

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1 (there w/2 on each side).

    Args:
        size: number of keys on each side, including the query itself; at least 1.
        dilation: distance of adjacent keys, in tokens; 1 is `Window`.
        plain_heads: number of heads with a dilation of 1; they are the first ones.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if size or dilation is less than 1, or plain_heads is less than 0; in a spec, if
            plain_heads has no effect, or leaves no head with the dilation.
    """

    paper: ClassVar[str] = "Beltagy et al. 2020, arXiv:2004.05150"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L size pairs"
    size: int = 65
    dilation: int = 2
    plain_heads: int = 0

    def __post_init__(self) -> None:
        check_int("Dilated size", self.size)
        check_int("Dilated dilation", self.dilation)
        check_int("Dilated plain_heads", self.plain_heads, least=0)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError if `plain_heads` has no effect, or leaves no head with the dilation."""
        check_plain_heads(self, self.plain_heads, self.dilation, choices)

    @property
    def max_distance(self) -> int:
        """``(size - 1) * dilation``."""
        return (self.size - 1) * self.dilation

    shift_period = 1  # only distances count

    @property
    def _column(self) -> "SameColumn":
        return SameColumn(self.dilation)

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Apply the rule of a head with the dilation."""
        return ((i - j).abs() <= self.max_distance) & self._column.mask_mod(i, j)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        if self.plain_heads == 0:
            return (self,)
        gaps = replace(self, plain_heads=0)
        plain = replace(gaps, dilation=1)
        return tuple(plain if head < self.plain_heads else gaps for head in range(heads))

    def group(self, i: Tensor) -> Tensor:
        return self._column.group(i)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        return self._column.candidate_keys(i, positions_near(i, self.max_distance, positions))


def check_plain_heads(pattern: Pattern, plain_heads: int, dilation: ByLayer, choices: SpecView) -> None:
    """Raise ValueError if heads without dilation have no effect, or no other head is left."""
    if plain_heads and max(numbers_by_layer(dilation)) == 1:
        raise ValueError(
            f"plain_heads of {pattern} has no effect with dilation={dilation}; set plain_heads=0 or a larger "
            f"dilation"
        )
    if plain_heads and plain_heads >= choices.heads:
        raise ValueError(
            f"plain_heads of {pattern} must be less than heads={choices.heads}, so that a head has the "
            f"dilation; decrease plain_heads, or use a dilation of 1"
        )


@dataclass(frozen=True)
class SameColumn(Pattern):
    """Pattern in which ``stride`` divides ``i - j``: a column of a sequence in rows of ``stride``."""

    stride: int

    shift_period = 1  # only distances count

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % self.stride == 0

    def group(self, i: Tensor) -> Tensor:
        """Return the column of each position, with long columns divided into groups.

        All queries of a column attend to the same keys.
        """
        return i.div(GROUP_SIZE * self.stride, rounding_mode="floor") * self.stride + i % self.stride

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        return positions[torch.isin(positions % self.stride, (i % self.stride).unique())]
