"""What every pattern offers, and how patterns join."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import lcm
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.checks import check_whole
from rlxf.attention.technique import Technique

UNLIMITED = 2**62
"""Reach of a pattern without a bound."""

GROUP = 64
"""Queries that are read together, unless the pattern says otherwise: enough to fill a matrix product."""


class Pattern(Technique, ABC):
    """A rule on positions: which keys may a query see?

    Whether keys ahead of the query are hidden is the transformer's business (``causal``), and
    so are episodes and empty slots. A pattern has no parameters, and what it draws at random it
    draws from a seed and from positions alone: acting and learning see the same.

    `allows` and `reach` say all. The others make a pattern different by layer or head, or let it be
    executed faster than by asking for every pair.
    """

    @property
    @abstractmethod
    def reach(self) -> int:
        """Largest distance, in tokens, at which a query may see a key; `UNLIMITED` without a bound."""

    @abstractmethod
    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether query position i may see key position j; the two broadcast.

        Of patterns that differ by layer or head, the rules are those of `for_layer` and `for_heads`.
        """

    @property
    def period(self) -> int | None:
        """Moved by so many tokens, i and j together, all is as before: 1 where distances alone count.

        What is arranged for one stretch of an episode then serves others. None, as by default, says nothing.
        """
        return None

    def for_layer(self, layer: int) -> "Pattern":
        """The pattern of layer 0, 1, ...: by default the same in all."""
        return self

    def for_heads(self, heads: int) -> tuple["Pattern", ...]:
        """One pattern for all heads, as by default, or one for each of them."""
        return (self,)

    def group(self, i: Tensor) -> Tensor:
        """A number for each query position (N,): those of one number are read together.

        Fast where they see about the same keys and are not many more than `GROUP`.
        """
        return i.div(GROUP, rounding_mode="floor")

    def keys(self, i: Tensor, among: Tensor) -> Tensor:
        """The positions ``among`` (N,), ascending, that some query position i (G,) may see, and maybe more.

        By default the rule is asked for each pair.
        """
        return among[self.allows(i[:, None], among).expand(len(i), len(among)).any(0)]

    def __and__(self, other: "Pattern") -> "Both":
        return Both(self, other)

    def __or__(self, other: "Pattern") -> "Either":
        return Either(self, other)


@dataclass(frozen=True)
class _Joined(Pattern):
    """Two patterns; each may differ by layer and head.

    Raises:
        TypeError: if one of them is no pattern.
        ValueError: if one has projections of its own for global tokens: they belong to a whole layer.
    """

    paper: ClassVar[str] = ""
    first: Pattern
    second: Pattern

    def __post_init__(self) -> None:
        for one in (self.first, self.second):
            if not isinstance(one, Pattern):
                raise TypeError(f"only patterns can be joined to a pattern, got {one!r}")
            if isinstance(one, GlobalTokens):
                raise ValueError(
                    f"{one} has projections for its global tokens and cannot be joined to a pattern"
                )

    @property
    def period(self) -> int | None:
        """The least that is one of both."""
        first, second = self.first.period, self.second.period
        return None if first is None or second is None else lcm(first, second)

    def for_layer(self, layer: int) -> Pattern:
        """See `Pattern`."""
        return type(self)(self.first.for_layer(layer), self.second.for_layer(layer))

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        """See `Pattern`."""
        first, second = self.first.for_heads(heads), self.second.for_heads(heads)
        number = max(len(first), len(second))
        pairs = zip(spread(first, number), spread(second, number), strict=True)
        return tuple(type(self)(*pair) for pair in pairs)

    def group(self, i: Tensor) -> Tensor:
        """That of the first."""
        return self.first.group(i)


def spread(patterns: tuple[Pattern, ...], number: int) -> tuple[Pattern, ...]:
    """As many patterns: one for all is repeated."""
    return patterns * (number // len(patterns))


@dataclass(frozen=True)
class Both(_Joined):
    """``first & second``: a key is visible if both patterns let it be."""

    @property
    def reach(self) -> int:
        """The smaller one."""
        return min(self.first.reach, self.second.reach)

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """first(i, j) and second(i, j)."""
        return self.first.allows(i, j) & self.second.allows(i, j)

    def keys(self, i: Tensor, among: Tensor) -> Tensor:
        """See `Pattern`."""
        return self.second.keys(i, self.first.keys(i, among))


@dataclass(frozen=True)
class Either(_Joined):
    """``first | second``: a key is visible if one of the patterns lets it be."""

    @property
    def reach(self) -> int:
        """The larger one."""
        return max(self.first.reach, self.second.reach)

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """first(i, j) or second(i, j)."""
        return self.first.allows(i, j) | self.second.allows(i, j)

    def keys(self, i: Tensor, among: Tensor) -> Tensor:
        """See `Pattern`."""
        return torch.cat([self.first.keys(i, among), self.second.keys(i, among)]).unique()


class BlockPattern(Pattern):
    """A rule on blocks of ``block`` positions: it is asked for pairs of blocks alone."""

    block: int

    @abstractmethod
    def meets(self, a: Tensor, b: Tensor) -> Tensor:
        """Whether queries of block a may see keys of block b; the two broadcast."""

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether the blocks meet."""
        return self.meets(*(x.div(self.block, rounding_mode="floor") for x in (i, j)))

    def group(self, i: Tensor) -> Tensor:
        """Blocks, cut if they are large."""
        return i.div(self.block, rounding_mode="floor") * self.block + i % self.block // GROUP

    def keys(self, i: Tensor, among: Tensor) -> Tensor:
        """See `Pattern`."""
        a, blocks = (x.div(self.block, rounding_mode="floor") for x in (i, among))
        a = a.unique_consecutive()
        b, block = blocks.unique_consecutive(return_inverse=True)
        return among[self.meets(a[:, None], b).expand(len(a), len(b)).any(0)[block]]


class GlobalTokens(Pattern):
    """The first ``global_tokens`` positions see all, are seen by all, and have projections of their own.

    With ``farthest``, no token sees one farther away than that: as an agent with a memory of that length.
    """

    global_tokens: int
    farthest: int | None

    @property
    @abstractmethod
    def local(self) -> Pattern:
        """What tokens see of others that are not global."""

    @property
    def far(self) -> int:
        """Distance, in tokens, beyond which no token sees another."""
        return UNLIMITED if self.farthest is None else self.farthest

    @property
    def reach(self) -> int:
        """`far`."""
        return self.far

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """i or j is global and the other not too far, or `local` allows it."""
        either = (i < self.global_tokens) | (j < self.global_tokens)
        return (either & ((i - j).abs() <= self.far)) | self.local.allows(i, j)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        """See `Pattern`."""
        others, globals_ = self.sides
        return tuple(Either(one, globals_) for one in others.for_heads(heads))

    @property
    def sides(self) -> tuple[Pattern, Pattern]:
        """The rule of the other tokens, and that of the global ones."""
        others = OthersLook(self.global_tokens, self.far, self.local)
        return others, GlobalsLook(self.global_tokens, self.far)


@dataclass(frozen=True)
class OthersLook(Pattern):
    """What tokens that are not global may see: global ones, unless they are too far, and what is local."""

    global_tokens: int
    far: int
    local: Pattern

    @property
    def reach(self) -> int:
        """The larger one of both."""
        return max(self.far, self.local.reach)

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """See `Pattern`."""
        known = (j < self.global_tokens) & ((i - j).abs() <= self.far)
        return (i >= self.global_tokens) & (known | self.local.allows(i, j))

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        """See `Pattern`."""
        return tuple(OthersLook(self.global_tokens, self.far, one) for one in self.local.for_heads(heads))

    def group(self, i: Tensor) -> Tensor:
        """Global tokens, which see nothing here, by themselves."""
        return torch.where(i < self.global_tokens, -1, self.local.group(i))

    def keys(self, i: Tensor, among: Tensor) -> Tensor:
        """See `Pattern`."""
        asking = i[i >= self.global_tokens]
        if not len(asking):
            return among[:0]
        first = between(max(0, int(asking.min()) - self.far), self.global_tokens - 1, among)
        return torch.cat([first, self.local.keys(asking, among)]).unique()


@dataclass(frozen=True)
class GlobalsLook(Pattern):
    """What global tokens may see: all that is not too far."""

    global_tokens: int
    far: int

    @property
    def reach(self) -> int:
        """How far that is."""
        return self.far

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """See `Pattern`."""
        return (i < self.global_tokens) & ((i - j).abs() <= self.far)

    def group(self, i: Tensor) -> Tensor:
        """Global tokens together, apart from the others, which see nothing here."""
        return torch.where(i < self.global_tokens, super().group(i), -1)

    def keys(self, i: Tensor, among: Tensor) -> Tensor:
        """See `Pattern`."""
        asking = i[i < self.global_tokens]
        return (
            between(int(asking.min()) - self.far, int(asking.max()) + self.far, among)
            if len(asking)
            else among[:0]
        )


def check_global_tokens(pattern: GlobalTokens) -> None:
    """Raise TypeError or ValueError unless the number of global tokens and the bound are in range."""
    name = type(pattern).__name__
    check_whole(f"{name} global_tokens", pattern.global_tokens)
    if pattern.farthest is not None:
        check_whole(f"{name} farthest", pattern.farthest)


def between(first: int, last: int, among: Tensor) -> Tensor:
    """Those of the ascending positions ``among`` that lie in [first, last]."""
    ends = [max(first, -UNLIMITED), min(last + 1, UNLIMITED)]  # an int64 holds no more
    start, end = torch.searchsorted(among, torch.tensor(ends, device=among.device)).tolist()
    return among[start:end]
