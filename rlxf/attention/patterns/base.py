"""Base classes of attention patterns, and intersections and unions of patterns."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.technique import SpecView, Technique, drop_outdated
from rlxf.attention.token_index import TokenIndex
from rlxf.utils.checks import MAX_INT, check_int
from rlxf.utils.errors import CompilationError

UNLIMITED = 2**62
"""Maximum distance of a pattern without a bound."""

GROUP_SIZE = 64
"""Default number of queries in a group; enough to use matrix products efficiently."""


RULES = frozenset({"mask_mod", "block_mask_mod"})
"""Methods that define the rule of a pattern."""
SHORTCUTS = ("allows_all_keys", "is_uniform_window", "shift_period", "candidate_keys", "within")
"""Attributes of a pattern with which its rule need not be evaluated."""


ByLayer = int | tuple[int, ...]
"""Option with one number for all layers, or with a tuple of numbers that repeats over the layers."""


class NoGlobalTokens(nn.Module):
    """No learned global tokens: the sequence is unchanged."""

    def index(self, index: TokenIndex) -> TokenIndex:
        """Return the index of all tokens, global tokens first, given that of the sequence, (B, T)."""
        return index

    def forward(self, x: Tensor, index: TokenIndex) -> Tensor:
        """Return the input of the first layer: x (B, T, C), unchanged. ``index`` is the result of `index`."""
        return x

    def trim_last_layer(self, layer: nn.Module) -> None:
        """Remove what the last layer, a `Block`, does not need if outputs of global tokens are unused."""


class Pattern(Technique, ABC):
    """Attention pattern: a rule on positions that decides which keys a query may attend to.

    The transformer itself hides later keys (``causal``), other episodes and empty slots. A pattern has no
    parameters. Random patterns are drawn from a seed and from positions only, so acting and learning use the
    same pattern.

    `mask_mod` and `max_distance` define the pattern. The other methods make it differ by layer, head or kind
    of query, or allow a faster implementation than a test of every pair.

    A subclass that overrides the rule of another pattern inherits its `max_distance`, but none of its
    `SHORTCUTS`, which may not hold for the new rule: it has the defaults of this class, or its own.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        drop_outdated(cls, Pattern, SHORTCUTS, RULES)

    @property
    def max_distance(self) -> int:
        """Largest distance, in tokens, at which a query may attend to a key; by default `UNLIMITED`."""
        return UNLIMITED

    @abstractmethod
    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether query position i may attend to key position j; the two broadcast.

        If the pattern differs by layer or head, the actual rules are those of `for_layer` and `for_heads`.
        """

    @property
    def allows_all_keys(self) -> bool:
        """True only if every query may attend to every key; kernels then need not evaluate the rule."""
        return False

    @property
    def is_uniform_window(self) -> bool:
        """True only if exactly the keys up to `max_distance` away are visible, in all layers and heads."""
        return False

    def check_capture(self, choices: SpecView) -> None:
        """Raise CompilationError unless each layer has a window; other masks depend on values."""
        if not all(self.for_layer(layer).is_uniform_window for layer in range(choices.layers)):
            raise CompilationError(f"the branches of the pattern {self} depend on values")

    @property
    def query_rules(self) -> tuple["Pattern", ...]:
        """One rule for each kind of query. Each kind has its own projections; by default there is one."""
        return (self,)

    @property
    def shift_period(self) -> int | None:
        """Number of tokens by which i and j can be shifted together without effect; None if unknown.

        It is 1 if only distances count. A layout computed for one part of an episode is reused for others
        that are shifted by a multiple of the period.
        """
        return None

    def for_layer(self, layer: int) -> "Pattern":
        """Return the pattern of layer 0, 1, ...; by default the same in all layers."""
        return self

    def for_heads(self, heads: int) -> tuple["Pattern", ...]:
        """Return one pattern for all heads (the default), or one for each head."""
        return (self,)

    def group(self, i: Tensor) -> Tensor:
        """Return the group number of each query position (N,); keys are gathered once for a group.

        This is fast if the queries of a group attend to about the same keys and are not many more than
        `GROUP_SIZE`.
        """
        return i.div(GROUP_SIZE, rounding_mode="floor")

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        """Return the key positions that some query of a group may attend to, or a superset of them.

        By default the rule is evaluated for each pair.

        Args:
            i: query positions of a group, (G,).
            positions: key positions, (N,), ascending.
        """
        return positions[self.mask_mod(i[:, None], positions).expand(len(i), len(positions)).any(0)]

    def within(self, distance: int) -> "Pattern | None":
        """Return a pattern of the same class, or a simpler one, that equals this pattern within a distance.

        The distance is less than `max_distance`. None, the default: `limit_distance` intersects this pattern
        with a `Window`.
        """
        return None

    def build_global_tokens(self, width: int, causal: bool) -> NoGlobalTokens:
        """Return the module that adds the pattern's learned global tokens to a sequence; by default none."""
        return NoGlobalTokens()

    def __and__(self, other: "Pattern") -> "Both":
        return Both(self, other)

    def __or__(self, other: "Pattern") -> "Either":
        return Either(self, other)


@dataclass(frozen=True)
class CombinedPattern(Pattern):
    """Combination of two patterns; each may differ by layer and head.

    Raises:
        TypeError: if an operand is not a pattern.
        ValueError: if an operand has separate projections for global tokens, which apply to a whole layer.
    """

    paper: ClassVar[str] = ""
    first: Pattern
    second: Pattern

    def check(self, choices: SpecView) -> None:
        """Check both patterns."""
        for pattern in (self.first, self.second):
            pattern.check(choices)

    def __post_init__(self) -> None:
        for pattern in (self.first, self.second):
            if not isinstance(pattern, Pattern):
                raise TypeError(f"a pattern can only be combined with another pattern, got {pattern!r}")
            if len(pattern.query_rules) > 1:
                raise ValueError(
                    f"{pattern} has separate projections for global tokens and cannot be combined with "
                    f"another pattern; use it alone, or combine BigBird(), whose global blocks have none"
                )

    @property
    def max_distance(self) -> int:
        """The larger of both distances."""
        return max(self.first.max_distance, self.second.max_distance)

    @property
    def allows_all_keys(self) -> bool:
        return self.first.allows_all_keys and self.second.allows_all_keys

    @property
    def shift_period(self) -> int | None:
        """Least common multiple of both periods."""
        first, second = self.first.shift_period, self.second.shift_period
        return None if first is None or second is None else lcm(first, second)

    def for_layer(self, layer: int) -> Pattern:
        return replace(self, first=self.first.for_layer(layer), second=self.second.for_layer(layer))

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        first, second = self.first.for_heads(heads), self.second.for_heads(heads)
        number = max(len(first), len(second))
        pairs = zip(repeat_for_heads(first, number), repeat_for_heads(second, number), strict=True)
        return tuple(replace(self, first=one, second=other) for one, other in pairs)

    def group(self, i: Tensor) -> Tensor:
        """Return the groups of the first pattern."""
        return self.first.group(i)


def repeat_for_heads(patterns: tuple[Pattern, ...], number: int) -> tuple[Pattern, ...]:
    """Repeat a pattern for all heads until there are ``number`` patterns."""
    return patterns * (number // len(patterns))


@dataclass(frozen=True)
class Both(CombinedPattern):
    """Intersection ``first & second``: a key is visible if both patterns allow it."""

    @property
    def max_distance(self) -> int:
        """The smaller of both distances."""
        return min(self.first.max_distance, self.second.max_distance)

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return first(i, j) and second(i, j)."""
        return self.first.mask_mod(i, j) & self.second.mask_mod(i, j)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        return self.second.candidate_keys(i, self.first.candidate_keys(i, positions))


@dataclass(frozen=True)
class Either(CombinedPattern):
    """Union ``first | second``: a key is visible if one of the patterns allows it."""

    @property
    def allows_all_keys(self) -> bool:
        return self.first.allows_all_keys or self.second.allows_all_keys

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return first(i, j) or second(i, j)."""
        return self.first.mask_mod(i, j) | self.second.mask_mod(i, j)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        parts = [pattern.candidate_keys(i, positions) for pattern in (self.first, self.second)]
        return torch.cat(parts).unique()


def numbers_by_layer(value: ByLayer) -> tuple[int, ...]:
    """Return the numbers that repeat over the layers."""
    return value if isinstance(value, tuple) else (value,)


def number_in_layer(value: ByLayer, layer: int) -> int:
    """Return the number of layer 0, 1, ..."""
    numbers = numbers_by_layer(value)
    return numbers[layer % len(numbers)]


def checked_by_layer(name: str, value: Any, least: int = 1, most: int = MAX_INT) -> ByLayer:
    """Return an option of type `ByLayer` after checks of its numbers; a list from JSON becomes a tuple.

    Raises:
        TypeError: if a number is not an int.
        ValueError: if a number is out of range, or there is none.
    """
    if not isinstance(value, list | tuple):
        check_int(name, value, least, most)
        return int(value)
    if not value:
        raise ValueError(f"{name} must be a number or a tuple of numbers, one for each layer, got {value}")
    for number in value:
        check_int(name, number, least, most)
    return tuple(value)


def check_has_layers(pattern: Pattern, name: str, value: ByLayer, choices: SpecView) -> None:
    """Raise ValueError if an option has more numbers than the transformer has layers."""
    number = len(numbers_by_layer(value))
    if number > choices.layers:
        raise ValueError(
            f"{pattern} has {number} values of {name}, and the transformer has layers={choices.layers}; give "
            f"at most one value for each layer, or set layers={number}"
        )


def check_fits_heads(pattern: Pattern, name: str, number: int, heads: int) -> None:
    """Raise ValueError if an option has more entries for heads than there are ``heads``."""
    if number > heads:
        raise ValueError(
            f"{pattern} has {number} {name} for {heads} heads, and does not use all of them; give at most "
            f"{heads}, or the transformer more heads"
        )


class BlockPattern(Pattern):
    """Rule on blocks of ``block`` positions, evaluated for pairs of blocks."""

    block: int

    @abstractmethod
    def block_mask_mod(self, a: Tensor, b: Tensor) -> Tensor:
        """Return whether queries of block a may attend to keys of block b; the two broadcast."""

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        return self.block_mask_mod(*(x.div(self.block, rounding_mode="floor") for x in (i, j)))

    def group(self, i: Tensor) -> Tensor:
        return group_in_blocks(i, self.block)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        a, blocks = (x.div(self.block, rounding_mode="floor") for x in (i, positions))
        a = a.unique_consecutive()
        b, block = blocks.unique_consecutive(return_inverse=True)
        return positions[self.block_mask_mod(a[:, None], b).expand(len(a), len(b)).any(0)[block]]


def group_in_blocks(i: Tensor, size: int) -> Tensor:
    """Return the group of each position: its block of ``size``, divided into parts of `GROUP_SIZE`."""
    return i.div(size, rounding_mode="floor") * size + i % size // GROUP_SIZE


def positions_near(i: Tensor, distance: int, positions: Tensor) -> Tensor:
    """Return the ascending positions up to a distance before the first and after the last of i."""
    return positions_between(int(i.min()) - distance, int(i.max()) + distance, positions)


def positions_between(first: int, last: int, positions: Tensor) -> Tensor:
    """Return the ascending positions that lie in [first, last]."""
    ends = [max(first, -UNLIMITED), min(last + 1, UNLIMITED)]  # range of int64
    start, end = torch.searchsorted(positions, torch.tensor(ends, device=positions.device)).tolist()
    return positions[start:end]
