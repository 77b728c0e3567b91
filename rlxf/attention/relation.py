"""Who may see whom, and from how far: what queries and keys are to one another."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlxf.attention.arrangement import PADDING, Part, arrange, count_pairs, find_runs
from rlxf.attention.index import EMPTY, Index
from rlxf.attention.patterns.base import GlobalTokens, Pattern

if TYPE_CHECKING:
    from rlxf.attention.positions.base import Embedding


@dataclass(frozen=True, eq=False)
class Tables:
    """What is computed from distances alone, once for many steps.

    Args:
        distances: (R,) int64, descending.
        shared: what the position makes of them for all layers, or None.
    """

    distances: Tensor
    shared: Tensor | None


SAVING, SMALL, LARGE = 1.5, 1 << 16, 1 << 22
"""Keys are gathered for groups of queries where a row has SMALL pairs and SAVING times as many as that
leaves; from LARGE on twice as many, as copies of keys take much memory."""


@dataclass(frozen=True, eq=False)
class Relation:
    """Distances and permissions between Tq queries and Tk keys, computed once for all layers.

    Args:
        query: index of the queries, (B, Tq).
        key: index of the keys, (B, Tk).
        pattern: which keys a query may see by its position.
        causal: whether keys ahead of the query are hidden.
        dtype: floating type of the mask.
        position: how order enters for all layers; None for not at all.
        tables: those made before; None: those that this pass needs.
        asking: which tokens of the segment the queries are; None for all of them.
        heads: number of heads H: patterns may differ by head.
    """

    query: Index
    key: Index
    pattern: Pattern
    causal: bool
    dtype: torch.dtype
    position: "Embedding | None" = None
    tables: Tables | None = None
    asking: slice | None = None
    heads: int = 1

    def asked_by(self, tokens: slice | None) -> "Relation":
        """The same for these queries alone, None for all: what lies between them and all keys."""
        return self if tokens is None else replace(self, query=self.query.at(tokens), asking=tokens)

    def queries(self, x: Tensor) -> Tensor:
        """Those tokens of a segment (B, T, C) that ask, (B, Tq, C)."""
        return x if self.asking is None else x[:, self.asking]

    @cached_property
    def distance(self) -> Tensor:
        """(B, Tq, Tk) int64: position of the query minus position of the key."""
        return self.query.position[:, :, None] - self.key.position[:, None, :]

    @cached_property
    def sides(self) -> "tuple[Relation, Relation]":
        """What tokens that are not global may see, and what global ones may."""
        assert isinstance(self.pattern, GlobalTokens)
        others, globals_ = self.pattern.sides
        return replace(self, pattern=others), replace(self, pattern=globals_)

    @cached_property
    def rules(self) -> dict[Pattern, list[int]]:
        """Each rule and the heads that have it; all heads, if there is one rule."""
        heads: dict[Pattern, list[int]] = {}
        for head, rule in enumerate(self.pattern.for_heads(self.heads)):
            heads.setdefault(rule, []).append(head)
        return heads

    @cached_property
    def allowed_by_head(self) -> Tensor:
        """(B, 1 or H, Tq, Tk) bool: same episode, slot not empty, allowed by the pattern, not ahead."""
        same = self.query.episode[:, :, None] == self.key.episode[:, None, :]
        same &= (self.key.episode != EMPTY)[:, None, :]
        if self.causal:
            same &= self.distance >= 0
        i, j = self.query.position[:, :, None], self.key.position[:, None, :]
        if len(self.rules) == 1:
            return (same & next(iter(self.rules)).allows(i, j))[:, None]
        allowed = {head: rule.allows(i, j) for rule, heads in self.rules.items() for head in heads}
        return torch.stack([same & allowed[head] for head in range(self.heads)], dim=1)

    @property
    def allowed(self) -> Tensor:
        """(B, Tq, Tk) bool: `allowed_by_head` in some head."""
        allowed = self.allowed_by_head
        return allowed[:, 0] if allowed.shape[1] == 1 else allowed.any(1)

    @cached_property
    def blind_by_head(self) -> Tensor | None:
        """(B, 1 or H, Tq) bool: queries that see no key in that head; None if there is none."""
        empty = self.query.episode == EMPTY
        blind = empty[:, None] if self._all_see_themselves else ~self.allowed_by_head.any(-1)
        return blind if bool(blind.any()) else None

    @cached_property
    def _all_see_themselves(self) -> bool:
        """Whether each token that asks is among the keys, and all rules let it see itself.

        That is found in the time of a sort. While acting, all pairs are few.
        """
        if self.tables is not None:
            return False
        position, filled = self.query.position, self.query.episode != EMPTY
        seen = filled & (find_slots(self.key, self.query) >= 0)
        seen &= torch.stack([rule.allows(position, position) for rule in self.rules]).all(0)
        return bool((seen == filled).all())

    @cached_property
    def blind(self) -> Tensor | None:
        """(B, Tq) bool: queries that see no key at all; None if there is none."""
        if not self._all_see_themselves and self.shares is not None:
            blind = ~self._seeing(self.shares)
        elif self.blind_by_head is None:
            return None
        else:
            blind = self.blind_by_head.all(1)
        return blind if bool(blind.any()) else None

    def _seeing(self, shares: "tuple[Share, ...]") -> Tensor:
        """(B, Tq) bool: queries that see a key in some head."""
        seeing = torch.zeros_like(self.query.position, dtype=torch.bool)
        for gathered in (gathered for share in shares for gathered in share.parts):
            seeing.view(-1)[gathered.part.query[gathered.allowed.any(-1)]] = True
        return seeing

    @cached_property
    def mask(self) -> Tensor:
        """(B, 1 or H, Tq, Tk): 0 where allowed, -inf elsewhere; 0 in blind rows, lest softmax be nan."""
        allowed = self.allowed_by_head
        if self.blind_by_head is not None:
            allowed = allowed | self.blind_by_head[..., None]
        return torch.where(allowed, 0.0, -torch.inf).to(self.dtype)

    @cached_property
    def shares(self) -> "tuple[Share, ...] | None":
        """Groups of queries with the keys gathered for them; None where all pairs at once are faster."""
        queries, keys = self.query.shape[1], self.key.shape[1]
        if self.tables is not None or queries * keys < SMALL:
            return None
        places = find_runs(self.query, self.key)
        if places is None:
            return None
        pairs = sum(count_pairs(rule, self.causal, places) for rule in self.rules) / len(self.rules)
        if pairs * self._saving(queries * keys) > self.query.position.numel() * keys:
            return None
        device = self.key.position.device
        parts = [arrange(rule, self.causal, places, device) for rule in self.rules]
        shares = zip(self.rules.items(), parts, strict=True)
        alone = len(parts) == 1
        return tuple(
            Share(
                slice(None) if alone else heads,
                [gathered for part in some for gathered in self._gathered(rule, part)],
            )
            for (rule, heads), some in shares
        )

    def _saving(self, pairs: int) -> float:
        """How many times fewer pairs have to be left for keys to be gathered, where a row has so many."""
        dearer = 1.0 if self.position is None else self.position.dearer_gathered
        return SAVING * dearer * (2 if pairs >= LARGE else 1)

    def _gathered(self, rule: Pattern, part: Part) -> "list[Gathered]":
        """The relations of a part, whose groups are the rows of the batch.

        There are several where the groups have too many different distances for one table.
        """
        query, key = _picked(self.query, part.query), _picked(self.key, part.key)
        whole = Gathered(query, key, rule, self.causal, self.dtype, self.position, part=part)
        size = part.key.shape[1]
        if self.position is None or len(whole.distances) <= 4 * size:
            return [whole]
        return whole.split(max(1, 2 * size // part.query.shape[1]))

    @property
    def _offset(self) -> int:
        """Slots of memory before the first query, if queries are the last of the keys."""
        return self.key.shape[1] - self.query.shape[1]

    @cached_property
    def aligned(self) -> bool:
        """Whether the distance of two tokens of one episode is the distance of their slots.

        True for one stretch of time, however it is cut into episodes. Then scores by distance
        become scores by key through one shifted view instead of a gather.
        """
        queries = self.query.shape[1]
        if queries == 1 or self._offset < 0:
            return False
        last = self.key.last(queries)
        same = torch.equal(self.query.position, last.position)
        return same and torch.equal(self.query.episode, last.episode) and self.key.unbroken

    @cached_property
    def distances(self) -> Tensor:
        """(R,) int64, descending: every distance needed, from the farthest back down to 0 or ahead."""
        if self.tables is not None:
            return self.tables.distances
        back, ahead = (self.key.shape[1] - 1, self.query.shape[1] - 1)
        if not self.aligned:
            seen = self.distance[self.allowed]
            back = int(seen.max()) if seen.numel() else 0
            ahead = -int(seen.min()) if seen.numel() else 0
        back = max(0, min(back, self.pattern.reach))
        ahead = 0 if self.causal else max(0, min(ahead, self.pattern.reach))
        return torch.arange(back, -ahead - 1, -1, device=self.key.position.device)

    @cached_property
    def table(self) -> Tensor | None:
        """What the position makes of `distances` for all layers."""
        if self.tables is not None:
            return self.tables.shared
        return None if self.position is None else self.position.table(self.distances, self.causal)

    @cached_property
    def bias(self) -> Tensor | None:
        """(B or 1, H, Tq, Tk): what is added to the scores of every layer; None for nothing."""
        return None if self.position is None else self.position.bias(self)

    @cached_property
    def _columns(self) -> Tensor:
        """(B, 1, Tq, Tk): which of `distances` is that of query and key; any where not allowed."""
        columns: Tensor = self.distances[0] - self.distance
        return columns.clamp_(0, self.distances.shape[0] - 1)[:, None]

    def scores(self, q: Tensor, table: Tensor) -> Tensor:
        """``q_i . table[distance(i, j)]`` for each query and key; anything where not allowed.

        Args:
            q: (B, H, Tq, D).
            table: (H, D, R), one column for each of `distances`.

        Returns:
            (B, H, Tq, Tk).
        """
        return self.by_key(_by_head(q, table))

    def key_scores(self, k: Tensor, table: Tensor) -> Tensor:
        """``k_j . table[distance(i, j)]``: as `scores`, for k (B, H, Tk, D)."""
        scores = _by_head(k, table.flip(-1))
        if self.aligned:
            farthest_ahead = -int(self.distances[-1])
            return _shift(scores, self._offset + farthest_ahead, self.query.shape[1]).transpose(-1, -2)
        columns = self.distances.shape[0] - 1 - self._columns.transpose(-1, -2)
        return scores.gather(-1, columns.expand(-1, k.shape[1], -1, -1)).transpose(-1, -2)

    def spread(self, table: Tensor) -> Tensor:
        """``table[distance(i, j)]``, of a table (H, R) -> (B or 1, H, Tq, Tk); see `scores`."""
        return self.by_key(table[None, :, None].expand(-1, -1, self.query.shape[1], -1))

    def by_key(self, scores: Tensor) -> Tensor:
        """Scores (B or 1, H, Tq, R) by distance -> (B or 1, H, Tq, Tk); anything where not allowed."""
        if self.aligned:
            return _shift(scores, int(self.distances[0]) - self._offset, self.key.shape[1])
        columns = self._columns.expand(-1, scores.shape[1], -1, -1)
        return scores.expand(columns.shape[0], -1, -1, -1).gather(-1, columns)

    def by_distance(self, weights: Tensor) -> Tensor:
        """Weights (B, H, Tq, Tk), 0 where not allowed -> those of each distance, (B, H, Tq, R).

        Rows of queries that see no key mean nothing; they are 0.
        """
        size = self.distances.shape[0]
        if self.blind_by_head is not None:
            weights = weights.masked_fill(self.blind_by_head[..., None], 0.0)
        if self.aligned:
            unshifted: Tensor = _Unshift.apply(weights, int(self.distances[0]) - self._offset, size)  # type: ignore[no-untyped-call]
            return unshifted
        columns = self._columns.expand(-1, weights.shape[1], -1, -1)
        return weights.new_zeros(*weights.shape[:-1], size).scatter_add(-1, columns, weights)


@dataclass(frozen=True, eq=False, kw_only=True)
class Gathered(Relation):
    """Queries (N, G) and the keys (N, K) gathered for them: N groups are the rows of a batch.

    Args:
        part: where they come from.
    """

    part: Part

    def split(self, groups: int) -> "list[Gathered]":
        """This relation for so many groups at a time."""
        count = self.part.query.shape[0]
        some = [slice(start, start + groups) for start in range(0, count, groups)]
        return [
            replace(self, query=_groups(self.query, n), key=_groups(self.key, n), part=self.part.groups(n))
            for n in some
        ]

    @property
    def allowed_by_head(self) -> Tensor:
        """(N, 1, G, K) bool: found when they were arranged."""
        return self.part.allowed[:, None]

    @property
    def aligned(self) -> bool:
        """Gathered keys are no stretch of time."""
        return False

    @cached_property
    def distances(self) -> Tensor:
        """(R,) int64, descending: those distances that there are, and no others."""
        seen = self.distance[self.allowed]
        if not seen.numel():
            return seen.new_zeros(1)
        least = seen.min()
        found = torch.zeros(int(seen.max() - least) + 1, dtype=torch.bool, device=seen.device)
        found[seen - least] = True
        return found.nonzero()[:, 0].flip(0) + least

    @cached_property
    def _columns(self) -> Tensor:
        """(N, 1, G, K): which of `distances` is that of query and key; any where not allowed."""
        ascending = self.distances.flip(0)
        place = torch.searchsorted(ascending, self.distance).clamp_(max=len(ascending) - 1)
        return (len(ascending) - 1 - place)[:, None]


@dataclass(frozen=True, eq=False)
class Share:
    """What heads with the same rule see.

    Args:
        heads: their numbers, or all.
        parts: each query is in one of them at most.
    """

    heads: list[int] | slice
    parts: list[Gathered]


def find_slots(index: Index, tokens: Index) -> Tensor:
    """The slot (B, T) in which each of some tokens (B, T) stands in its row of an index; -1 for none."""
    slots, wanted = ((one.episode << 32) + one.position for one in (index, tokens))
    if not slots.shape[1]:
        return torch.full_like(wanted, -1)
    slots, order = slots.sort(dim=1)
    place = torch.searchsorted(slots, wanted.contiguous()).clamp(max=slots.shape[1] - 1)
    return torch.where(slots.gather(1, place) == wanted, order.gather(1, place), -1)


def _groups(index: Index, groups: slice) -> Index:
    return Index(index.position[groups], index.episode[groups])


def _picked(index: Index, slots: Tensor) -> Index:
    """Where the tokens of flat slots (N, G) stand; empty for padding. A group is of one episode: 0."""
    filled = slots != PADDING
    position = index.position.flatten()[slots.clamp(min=0)]
    return Index(position, torch.where(filled, 0, EMPTY))


def _by_head(q: Tensor, table: Tensor) -> Tensor:
    """q (B, H, T, D), table (H, D, R) -> (B, H, T, R); ``@`` alone would copy the table for every row."""
    rows = q.transpose(0, 1).flatten(1, 2)
    return (rows @ table).unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)


def _shift(scores: Tensor, first: int, columns: int) -> Tensor:
    """Transformer-XL's relative shift (Dai et al. 2019, appendix B) for any window.

    ``out[i, j] = scores[i, j + first - i]`` for j < columns: row i moves i columns to the right.
    """
    shifted: Tensor = _Shift.apply(scores, first, columns)  # type: ignore[no-untyped-call]
    return shifted


class _Shift(torch.autograd.Function):
    """`_shift`. Rows of N + 1 numbers read as rows of N do that.

    torch's own padding and slices would do; their gradients fill more buffers of this size with zeros.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, first: int, columns: int) -> Tensor:
        ctx.given = (first, scores.shape[-1])
        return _moved_right(scores, first, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _moved_left(gradient, *ctx.given), None, None


class _Unshift(torch.autograd.Function):
    """``out[i, c] = weights[i, c - first + i]`` for c < columns, 0 beyond: `_shift` transposed."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, first: int, columns: int) -> Tensor:
        ctx.given = (first, weights.shape[-1])
        return _moved_left(weights, first, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _moved_right(gradient, *ctx.given), None, None


def _moved_right(x: Tensor, first: int, columns: int) -> Tensor:
    left = max(0, -first)
    width = max(columns, left + x.shape[-1])
    whole = x.new_zeros(*x.shape[:-1], width + 1)
    whole[..., left : left + x.shape[-1]] = x
    return _shifted_rows(whole, left + first)[..., :columns]


def _moved_left(x: Tensor, first: int, columns: int) -> Tensor:
    left = max(0, -first)
    width = max(x.shape[-1], left + columns)
    whole = x.new_zeros(*x.shape[:-1], width + 1)
    _shifted_rows(whole, left + first)[..., : x.shape[-1]] = x
    return whole[..., left : left + columns]


def _shifted_rows(whole: Tensor, start: int) -> Tensor:
    """Rows of N + 1 numbers, (B, H, T, N + 1), read as rows of N from ``start`` on: a view."""
    queries, width = whole.shape[-2], whole.shape[-1] - 1
    return whole.flatten(-2)[..., start : start + queries * width].unflatten(-1, (queries, width))
