"""Base classes of attention patterns, and their intersections and unions."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import lcm
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.technique import Technique
from rlxf.attention.validation import check_int

UNLIMITED = 2**62
"""Reach of a pattern without a bound."""

GROUP_SIZE = 64
"""Default number of queries in a group; enough to use matrix products efficiently."""


class Pattern(Technique, ABC):
    """Attention pattern: a rule on positions that decides which keys a query may see.

    The transformer itself hides later keys (``causal``), other episodes and empty slots. A pattern has no
    parameters. Random patterns are drawn from a seed and from positions only, so acting and learning use the
    same pattern.

    `mask_mod` and `reach` define the pattern. The other methods make it differ by layer or head, or allow a
    faster implementation than a test of every pair.
    """

    @property
    @abstractmethod
    def max_distance(self) -> int:
        """Largest distance, in tokens, at which a query may see a key; `UNLIMITED` without a bound."""

    @abstractmethod
    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether query position i may see key position j; the two broadcast.

        If the pattern differs by layer or head, the actual rules are those of `for_layer` and `for_heads`.
        """

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

        This is fast if the queries of a group see about the same keys and are not many more than
        `GROUP_SIZE`.
        """
        return i.div(GROUP_SIZE, rounding_mode="floor")

    def candidate_keys(self, i: Tensor, among: Tensor) -> Tensor:
        """Return the positions ``among`` that some query of a group may see, or a superset of them.

        By default the rule is evaluated for each pair.

        Args:
            i: query positions of a group, (G,).
            among: key positions, (N,), ascending.
        """
        return among[self.mask_mod(i[:, None], among).expand(len(i), len(among)).any(0)]

    def __and__(self, other: "Pattern") -> "Both":
        return Both(self, other)

    def __or__(self, other: "Pattern") -> "Either":
        return Either(self, other)


@dataclass(frozen=True)
class _Combined(Pattern):
    """Combination of two patterns; each may differ by layer and head.

    Raises:
        TypeError: if an operand is not a pattern.
        ValueError: if an operand has separate projections for global tokens, which apply to a whole layer.
    """

    paper: ClassVar[str] = ""
    first: Pattern
    second: Pattern

    def __post_init__(self) -> None:
        for pattern in (self.first, self.second):
            if not isinstance(pattern, Pattern):
                raise TypeError(f"a pattern can only be combined with another pattern, got {pattern!r}")
            if isinstance(pattern, GlobalTokens):
                raise ValueError(
                    f"{pattern} has separate projections for global tokens and cannot be combined with "
                    f"another pattern"
                )

    @property
    def shift_period(self) -> int | None:
        """Least common multiple of both periods."""
        first, second = self.first.shift_period, self.second.shift_period
        return None if first is None or second is None else lcm(first, second)

    def for_layer(self, layer: int) -> Pattern:
        return type(self)(self.first.for_layer(layer), self.second.for_layer(layer))

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        first, second = self.first.for_heads(heads), self.second.for_heads(heads)
        number = max(len(first), len(second))
        pairs = zip(repeat_for_heads(first, number), repeat_for_heads(second, number), strict=True)
        return tuple(type(self)(*pair) for pair in pairs)

    def group(self, i: Tensor) -> Tensor:
        """Return the groups of the first pattern."""
        return self.first.group(i)


def repeat_for_heads(patterns: tuple[Pattern, ...], number: int) -> tuple[Pattern, ...]:
    """Repeat a pattern for all heads until there are ``number`` patterns."""
    return patterns * (number // len(patterns))


@dataclass(frozen=True)
class Both(_Combined):
    """Intersection ``first & second``: a key is visible if both patterns allow it."""

    @property
    def max_distance(self) -> int:
        """The smaller of both reaches."""
        return min(self.first.max_distance, self.second.max_distance)

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return first(i, j) and second(i, j)."""
        return self.first.mask_mod(i, j) & self.second.mask_mod(i, j)

    def candidate_keys(self, i: Tensor, among: Tensor) -> Tensor:
        return self.second.candidate_keys(i, self.first.candidate_keys(i, among))


@dataclass(frozen=True)
class Either(_Combined):
    """Union ``first | second``: a key is visible if one of the patterns allows it."""

    @property
    def max_distance(self) -> int:
        """The larger of both reaches."""
        return max(self.first.max_distance, self.second.max_distance)

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return first(i, j) or second(i, j)."""
        return self.first.mask_mod(i, j) | self.second.mask_mod(i, j)

    def candidate_keys(self, i: Tensor, among: Tensor) -> Tensor:
        return torch.cat([self.first.candidate_keys(i, among), self.second.candidate_keys(i, among)]).unique()


class BlockPattern(Pattern):
    """Rule on blocks of ``block`` positions, evaluated for pairs of blocks."""

    block: int

    @abstractmethod
    def block_mask_mod(self, a: Tensor, b: Tensor) -> Tensor:
        """Return whether queries of block a may see keys of block b; the two broadcast."""

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        return self.block_mask_mod(*(x.div(self.block, rounding_mode="floor") for x in (i, j)))

    def group(self, i: Tensor) -> Tensor:
        """Return the block of each position, with large blocks divided into groups."""
        return i.div(self.block, rounding_mode="floor") * self.block + i % self.block // GROUP_SIZE

    def candidate_keys(self, i: Tensor, among: Tensor) -> Tensor:
        a, blocks = (x.div(self.block, rounding_mode="floor") for x in (i, among))
        a = a.unique_consecutive()
        b, block = blocks.unique_consecutive(return_inverse=True)
        return among[self.block_mask_mod(a[:, None], b).expand(len(a), len(b)).any(0)[block]]


class GlobalTokens(Pattern):
    """Pattern with global tokens: the first ``global_tokens`` positions see all and are seen by all.

    Global tokens have separate projections. With ``farthest``, no token sees one farther away: as for an
    agent with a memory of that length.
    """

    global_tokens: int
    farthest: int | None

    @property
    @abstractmethod
    def local(self) -> Pattern:
        """Pattern of the tokens that are not global among themselves."""

    @property
    def far(self) -> int:
        """Distance, in tokens, beyond which no token sees another."""
        return UNLIMITED if self.farthest is None else self.farthest

    @property
    def max_distance(self) -> int:
        """Equal to `far`."""
        return self.far

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether i or j is global and their distance is at most `far`, or `local` allows the pair."""
        either = (i < self.global_tokens) | (j < self.global_tokens)
        return (either & ((i - j).abs() <= self.far)) | self.local.mask_mod(i, j)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        others, globals_ = self.sides
        return tuple(Either(pattern, globals_) for pattern in others.for_heads(heads))

    @property
    def sides(self) -> tuple[Pattern, Pattern]:
        """Rule of the tokens that are not global, and rule of the global tokens."""
        others = LocalQueries(self.global_tokens, self.far, self.local)
        return others, GlobalQueries(self.global_tokens, self.far)


@dataclass(frozen=True)
class LocalQueries(Pattern):
    """Keys visible to tokens that are not global: global tokens within distance ``far``, and local ones."""

    global_tokens: int
    far: int
    local: Pattern

    @property
    def max_distance(self) -> int:
        """The larger of ``far`` and the local reach."""
        return max(self.far, self.local.max_distance)

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        is_global = (j < self.global_tokens) & ((i - j).abs() <= self.far)
        return (i >= self.global_tokens) & (is_global | self.local.mask_mod(i, j))

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        return tuple(
            LocalQueries(self.global_tokens, self.far, pattern) for pattern in self.local.for_heads(heads)
        )

    def group(self, i: Tensor) -> Tensor:
        """Return local groups; global tokens, which see nothing here, form a group of their own."""
        return torch.where(i < self.global_tokens, -1, self.local.group(i))

    def candidate_keys(self, i: Tensor, among: Tensor) -> Tensor:
        queries = i[i >= self.global_tokens]
        if not len(queries):
            return among[:0]
        first = positions_between(max(0, int(queries.min()) - self.far), self.global_tokens - 1, among)
        return torch.cat([first, self.local.candidate_keys(queries, among)]).unique()


@dataclass(frozen=True)
class GlobalQueries(Pattern):
    """Keys visible to global tokens: all within distance ``far``."""

    global_tokens: int
    far: int

    @property
    def max_distance(self) -> int:
        """Equal to ``far``."""
        return self.far

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        return (i < self.global_tokens) & ((i - j).abs() <= self.far)

    def group(self, i: Tensor) -> Tensor:
        """Return groups of global tokens; the other tokens, which see nothing here, form one group."""
        return torch.where(i < self.global_tokens, super().group(i), -1)

    def candidate_keys(self, i: Tensor, among: Tensor) -> Tensor:
        queries = i[i < self.global_tokens]
        return (
            positions_between(int(queries.min()) - self.far, int(queries.max()) + self.far, among)
            if len(queries)
            else among[:0]
        )


def check_global_tokens(pattern: GlobalTokens) -> None:
    """Raise TypeError or ValueError unless the number of global tokens and the bound are in range."""
    name = type(pattern).__name__
    check_int(f"{name} global_tokens", pattern.global_tokens)
    if pattern.farthest is not None:
        check_int(f"{name} farthest", pattern.farthest)


def positions_between(first: int, last: int, among: Tensor) -> Tensor:
    """Return the positions in [first, last] of the ascending positions ``among``."""
    ends = [max(first, -UNLIMITED), min(last + 1, UNLIMITED)]  # range of int64
    start, end = torch.searchsorted(among, torch.tensor(ends, device=among.device)).tolist()
    return among[start:end]
