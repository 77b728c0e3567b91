"""Attention masks and relative distances between queries and keys."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlxf.attention.patterns.base import GlobalTokens, Pattern
from rlxf.attention.sparse.layout import PADDING, BlockGroup, build_layout, count_pairs, find_episode_spans
from rlxf.attention.token_index import EMPTY, TokenIndex

if TYPE_CHECKING:
    from rlxf.attention.positions.base import PositionEmbedding


@dataclass(frozen=True, eq=False)
class DistanceTables:
    """Distance tables that are computed once and reused for many steps.

    Args:
        distances: (R,) int64, descending.
        shared: table of the position encoding for all layers, or None.
    """

    distances: Tensor
    shared: Tensor | None


MIN_SAVING, MIN_SPARSE_PAIRS, LARGE_PAIRS = 1.5, 1 << 16, 1 << 22
"""Thresholds of block-sparse attention: at least SMALL query-key pairs per row, and at least SAVING times
fewer pairs than dense attention. From LARGE pairs on the factor doubles, as copied keys take much memory."""


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Attention mask and relative distances between Tq queries and Tk keys, computed once for all layers.

    Args:
        query: index of the queries, (B, Tq).
        key: index of the keys, (B, Tk).
        pattern: attention pattern, a rule on positions.
        causal: whether future keys are masked.
        dtype: floating-point type of the mask.
        position: position module that is shared by all layers; None for none.
        tables: precomputed distance tables; None computes the tables that this pass needs.
        query_slice: tokens of the segment that are queries; None for all.
        heads: number of heads H; patterns may differ by head.
    """

    query: TokenIndex
    key: TokenIndex
    pattern: Pattern
    causal: bool
    dtype: torch.dtype
    position: "PositionEmbedding | None" = None
    tables: DistanceTables | None = None
    query_slice: slice | None = None
    heads: int = 1

    def select_queries(self, tokens: slice | None) -> "AttentionMask":
        """Restrict the mask to some of the queries, over all keys; None selects all queries."""
        return self if tokens is None else replace(self, query=self.query.at(tokens), query_slice=tokens)

    def queries(self, x: Tensor) -> Tensor:
        """Select the tokens of a segment (B, T, C) that are queries, (B, Tq, C)."""
        return x if self.query_slice is None else x[:, self.query_slice]

    @cached_property
    def distance(self) -> Tensor:
        """Position of the query minus position of the key: (B, Tq, Tk) int64."""
        return self.query.position[:, :, None] - self.key.position[:, None, :]

    @cached_property
    def sides(self) -> "tuple[AttentionMask, AttentionMask]":
        """Masks of the queries that are not global tokens, and of those that are."""
        assert isinstance(self.pattern, GlobalTokens)
        others, globals_ = self.pattern.sides
        return replace(self, pattern=others), replace(self, pattern=globals_)

    @cached_property
    def rules(self) -> dict[Pattern, list[int]]:
        """Distinct patterns of the heads, and the heads that use each; all heads if there is one pattern."""
        heads: dict[Pattern, list[int]] = {}
        for head, rule in enumerate(self.pattern.for_heads(self.heads)):
            heads.setdefault(rule, []).append(head)
        return heads

    @cached_property
    def allowed_by_head(self) -> Tensor:
        """Boolean attention mask (B, 1 or H, Tq, Tk), True where the query may attend to the key.

        Both tokens are in the same episode and the pattern allows the pair. If causal, the key is not later.
        """
        same = self.query.episode[:, :, None] == self.key.episode[:, None, :]
        same &= (self.key.episode != EMPTY)[:, None, :]
        if self.causal:
            same &= self.distance >= 0
        i, j = self.query.position[:, :, None], self.key.position[:, None, :]
        if len(self.rules) == 1:
            return (same & next(iter(self.rules)).mask_mod(i, j))[:, None]
        allowed = {head: rule.mask_mod(i, j) for rule, heads in self.rules.items() for head in heads}
        return torch.stack([same & allowed[head] for head in range(self.heads)], dim=1)

    @property
    def allowed(self) -> Tensor:
        """Union of `allowed_by_head` over the heads: (B, Tq, Tk) bool."""
        allowed = self.allowed_by_head
        return allowed[:, 0] if allowed.shape[1] == 1 else allowed.any(1)

    @cached_property
    def fully_masked_by_head(self) -> Tensor | None:
        """Fully masked queries by head: (B, 1 or H, Tq) bool; None if there are none."""
        empty = self.query.episode == EMPTY
        blind = empty[:, None] if self._self_visible else ~self.allowed_by_head.any(-1)
        return blind if bool(blind.any()) else None

    @cached_property
    def _self_visible(self) -> bool:
        """Return whether every query is also a key, and every pattern allows it to attend to itself.

        The check costs a sort instead of the full mask. It is skipped while acting, where pairs are few.
        """
        if self.tables is not None:
            return False
        position, filled = self.query.position, self.query.episode != EMPTY
        visible = filled & (find_slots(self.key, self.query) >= 0)
        visible &= torch.stack([rule.mask_mod(position, position) for rule in self.rules]).all(0)
        return bool((visible == filled).all())

    @cached_property
    def fully_masked(self) -> Tensor | None:
        """Queries that are fully masked in all heads: (B, Tq) bool; None if there are none."""
        if not self._self_visible and self.head_groups is not None:
            blind = ~self._has_keys(self.head_groups)
        elif self.fully_masked_by_head is None:
            return None
        else:
            blind = self.fully_masked_by_head.all(1)
        return blind if bool(blind.any()) else None

    def _has_keys(self, shares: "tuple[HeadGroup, ...]") -> Tensor:
        """Return which queries have a visible key in some head: (B, Tq) bool."""
        has_keys = torch.zeros_like(self.query.position, dtype=torch.bool)
        for gathered in (gathered for share in shares for gathered in share.parts):
            has_keys.view(-1)[gathered.part.query[gathered.allowed.any(-1)]] = True
        return has_keys

    @cached_property
    def mask(self) -> Tensor:
        """Additive mask (B, 1 or H, Tq, Tk): 0 where allowed, -inf elsewhere.

        Fully masked rows are 0, because softmax over -inf only is NaN.
        """
        allowed = self.allowed_by_head
        if self.fully_masked_by_head is not None:
            allowed = allowed | self.fully_masked_by_head[..., None]
        return torch.where(allowed, 0.0, -torch.inf).to(self.dtype)

    @cached_property
    def head_groups(self) -> "tuple[HeadGroup, ...] | None":
        """Head groups with their block groups for sparse attention; None where dense attention is faster."""
        queries, keys = self.query.shape[1], self.key.shape[1]
        if self.tables is not None or queries * keys < MIN_SPARSE_PAIRS:
            return None
        places = find_episode_spans(self.query, self.key)
        if places is None:
            return None
        pairs = sum(count_pairs(rule, self.causal, places) for rule in self.rules) / len(self.rules)
        if pairs * self._required_saving(queries * keys) > self.query.position.numel() * keys:
            return None
        device = self.key.position.device
        parts = [build_layout(rule, self.causal, places, device) for rule in self.rules]
        shares = zip(self.rules.items(), parts, strict=True)
        single_rule = len(parts) == 1
        return tuple(
            HeadGroup(
                slice(None) if single_rule else heads,
                [gathered for part in rule_parts for gathered in self._gather(rule, part)],
            )
            for (rule, heads), rule_parts in shares
        )

    def _required_saving(self, pairs: int) -> float:
        """Return the factor by which sparse attention must reduce the given pairs per row to be used."""
        dearer = 1.0 if self.position is None else self.position.gather_cost
        return MIN_SAVING * dearer * (2 if pairs >= LARGE_PAIRS else 1)

    def _gather(self, rule: Pattern, part: BlockGroup) -> "list[GatheredMask]":
        """Return the masks of a block group, with its groups as batch rows.

        The block group is split where it has too many distinct distances for one table.
        """
        query, key = _gather_index(self.query, part.query), _gather_index(self.key, part.key)
        gathered = GatheredMask(query, key, rule, self.causal, self.dtype, self.position, part=part)
        size = part.key.shape[1]
        if self.position is None or len(gathered.distances) <= 4 * size:
            return [gathered]
        return gathered.split(max(1, 2 * size // part.query.shape[1]))

    @property
    def _offset(self) -> int:
        """Number of memory slots before the first query, if the queries are the last keys."""
        return self.key.shape[1] - self.query.shape[1]

    @cached_property
    def aligned(self) -> bool:
        """Return whether the distance of two tokens of one episode equals the distance of their slots.

        True for a contiguous segment with any episode boundaries. Scores by distance then
        become scores by key through a shifted view (relative shift) instead of a gather.
        """
        queries = self.query.shape[1]
        if queries == 1 or self._offset < 0:
            return False
        last = self.key.last(queries)
        same = torch.equal(self.query.position, last.position)
        return same and torch.equal(self.query.episode, last.episode) and self.key.contiguous

    @cached_property
    def distances(self) -> Tensor:
        """Distances that the tables cover, (R,) int64, descending; future keys have negative distances."""
        if self.tables is not None:
            return self.tables.distances
        past, future = (self.key.shape[1] - 1, self.query.shape[1] - 1)
        if not self.aligned:
            visible = self.distance[self.allowed]
            past = int(visible.max()) if visible.numel() else 0
            future = -int(visible.min()) if visible.numel() else 0
        past = max(0, min(past, self.pattern.max_distance))
        future = 0 if self.causal else max(0, min(future, self.pattern.max_distance))
        return torch.arange(past, -future - 1, -1, device=self.key.position.device)

    @cached_property
    def table(self) -> Tensor | None:
        """Table of the position encoding over `distances`, shared by all layers; None for none."""
        if self.tables is not None:
            return self.tables.shared
        return None if self.position is None else self.position.table(self.distances, self.causal)

    @cached_property
    def bias(self) -> Tensor | None:
        """Bias that is added to the scores of every layer, (B or 1, H, Tq, Tk); None for none."""
        return None if self.position is None else self.position.bias(self)

    @cached_property
    def _columns(self) -> Tensor:
        """Column in `distances` of each query-key pair, (B, 1, Tq, Tk); arbitrary where masked."""
        columns: Tensor = self.distances[0] - self.distance
        return columns.clamp_(0, self.distances.shape[0] - 1)[:, None]

    def scores(self, q: Tensor, table: Tensor) -> Tensor:
        """Compute ``q_i . table[distance(i, j)]`` for each query and key; arbitrary where masked.

        Args:
            q: queries, (B, H, Tq, D).
            table: (H, D, R), one column per entry of `distances`.

        Returns:
            (B, H, Tq, Tk).
        """
        return self.distance_to_key(_by_head(q, table))

    def key_scores(self, k: Tensor, table: Tensor) -> Tensor:
        """Compute ``k_j . table[distance(i, j)]`` for keys k (B, H, Tk, D); otherwise like `scores`."""
        scores = _by_head(k, table.flip(-1))
        if self.aligned:
            max_future = -int(self.distances[-1])
            return _shift(scores, self._offset + max_future, self.query.shape[1]).transpose(-1, -2)
        columns = self.distances.shape[0] - 1 - self._columns.transpose(-1, -2)
        return scores.gather(-1, columns.expand(-1, k.shape[1], -1, -1)).transpose(-1, -2)

    def spread(self, table: Tensor) -> Tensor:
        """Look up ``table[distance(i, j)]``: table (H, R) -> (B or 1, H, Tq, Tk); arbitrary where masked."""
        return self.distance_to_key(table[None, :, None].expand(-1, -1, self.query.shape[1], -1))

    def distance_to_key(self, scores: Tensor) -> Tensor:
        """Convert scores by distance (B or 1, H, Tq, R) to (B or 1, H, Tq, Tk); arbitrary where masked."""
        if self.aligned:
            return _shift(scores, int(self.distances[0]) - self._offset, self.key.shape[1])
        columns = self._columns.expand(-1, scores.shape[1], -1, -1)
        return scores.expand(columns.shape[0], -1, -1, -1).gather(-1, columns)

    def key_to_distance(self, weights: Tensor) -> Tensor:
        """Sum weights (B, H, Tq, Tk), 0 where masked, by distance -> (B, H, Tq, R).

        Rows of fully masked queries are 0.
        """
        size = self.distances.shape[0]
        if self.fully_masked_by_head is not None:
            weights = weights.masked_fill(self.fully_masked_by_head[..., None], 0.0)
        if self.aligned:
            unshifted: Tensor = _Unshift.apply(weights, int(self.distances[0]) - self._offset, size)  # type: ignore[no-untyped-call]
            return unshifted
        columns = self._columns.expand(-1, weights.shape[1], -1, -1)
        return weights.new_zeros(*weights.shape[:-1], size).scatter_add(-1, columns, weights)


@dataclass(frozen=True, eq=False, kw_only=True)
class GatheredMask(AttentionMask):
    """Mask of N groups of queries (N, G) and their gathered keys (N, K); the groups are batch rows.

    Args:
        part: block group that the queries and keys come from.
    """

    part: BlockGroup

    def split(self, groups: int) -> "list[GatheredMask]":
        """Split into masks of at most ``groups`` groups each."""
        count = self.part.query.shape[0]
        chunks = [slice(start, start + groups) for start in range(0, count, groups)]
        return [
            replace(self, query=_groups(self.query, c), key=_groups(self.key, c), part=self.part.groups(c))
            for c in chunks
        ]

    @property
    def allowed_by_head(self) -> Tensor:
        """Boolean attention mask of the block group, (N, 1, G, K)."""
        return self.part.allowed[:, None]

    @property
    def aligned(self) -> bool:
        """Return False: gathered keys are not contiguous."""
        return False

    @cached_property
    def distances(self) -> Tensor:
        """Distinct distances of visible pairs, (R,) int64, descending."""
        visible = self.distance[self.allowed]
        if not visible.numel():
            return visible.new_zeros(1)
        least = visible.min()
        present = torch.zeros(int(visible.max() - least) + 1, dtype=torch.bool, device=visible.device)
        present[visible - least] = True
        return present.nonzero()[:, 0].flip(0) + least

    @cached_property
    def _columns(self) -> Tensor:
        """Column in `distances` of each query-key pair, (N, 1, G, K); arbitrary where masked."""
        ascending = self.distances.flip(0)
        rank = torch.searchsorted(ascending, self.distance).clamp_(max=len(ascending) - 1)
        return (len(ascending) - 1 - rank)[:, None]


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Heads with the same pattern, and their block groups.

    Args:
        heads: head numbers, or a slice of all heads.
        parts: masks of the block groups; each query is in at most one group.
    """

    heads: list[int] | slice
    parts: list[GatheredMask]


def find_slots(index: TokenIndex, tokens: TokenIndex) -> Tensor:
    """Return the slot (B, T) of each of the tokens (B, T) in its row of an index; -1 if it is missing."""
    keys, targets = ((one.episode << 32) + one.position for one in (index, tokens))
    if not keys.shape[1]:
        return torch.full_like(targets, -1)
    keys, order = keys.sort(dim=1)
    rank = torch.searchsorted(keys, targets.contiguous()).clamp(max=keys.shape[1] - 1)
    return torch.where(keys.gather(1, rank) == targets, order.gather(1, rank), -1)


def _groups(index: TokenIndex, groups: slice) -> TokenIndex:
    return TokenIndex(index.position[groups], index.episode[groups])


def _gather_index(index: TokenIndex, slots: Tensor) -> TokenIndex:
    """Return the index of the tokens in flat slots (N, G). Padding is empty; other tokens get episode 0.

    A group belongs to one episode, so its number does not matter.
    """
    filled = slots != PADDING
    position = index.position.flatten()[slots.clamp(min=0)]
    return TokenIndex(position, torch.where(filled, 0, EMPTY))


def _by_head(q: Tensor, table: Tensor) -> Tensor:
    """Multiply q (B, H, T, D) by table (H, D, R) -> (B, H, T, R), without a copy of the table per row."""
    rows = q.transpose(0, 1).flatten(1, 2)
    return (rows @ table).unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)


def _shift(scores: Tensor, first: int, columns: int) -> Tensor:
    """Apply the relative shift of Transformer-XL (Dai et al. 2019, appendix B) for any window.

    ``out[i, j] = scores[i, j + first - i]`` for j < columns: row i moves i columns to the right.
    """
    shifted: Tensor = _Shift.apply(scores, first, columns)  # type: ignore[no-untyped-call]
    return shifted


class _Shift(torch.autograd.Function):
    """Autograd function of `_shift`: rows of N + 1 numbers are viewed as rows of N.

    The gradients of torch's own padding and slicing would allocate more buffers of this size.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, first: int, columns: int) -> Tensor:
        ctx.arguments = (first, scores.shape[-1])
        return _shift_right(scores, first, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _shift_left(gradient, *ctx.arguments), None, None


class _Unshift(torch.autograd.Function):
    """Transpose of `_shift`: ``out[i, c] = weights[i, c - first + i]`` for c < columns, 0 out of range."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, first: int, columns: int) -> Tensor:
        ctx.arguments = (first, weights.shape[-1])
        return _shift_left(weights, first, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _shift_right(gradient, *ctx.arguments), None, None


def _shift_right(x: Tensor, first: int, columns: int) -> Tensor:
    left = max(0, -first)
    width = max(columns, left + x.shape[-1])
    buffer = x.new_zeros(*x.shape[:-1], width + 1)
    buffer[..., left : left + x.shape[-1]] = x
    return _shifted_rows(buffer, left + first)[..., :columns]


def _shift_left(x: Tensor, first: int, columns: int) -> Tensor:
    left = max(0, -first)
    width = max(x.shape[-1], left + columns)
    buffer = x.new_zeros(*x.shape[:-1], width + 1)
    _shifted_rows(buffer, left + first)[..., : x.shape[-1]] = x
    return buffer[..., left : left + columns]


def _shifted_rows(buffer: Tensor, start: int) -> Tensor:
    """View rows of N + 1 numbers, (B, H, T, N + 1), as rows of N, from flat offset ``start``."""
    queries, width = buffer.shape[-2], buffer.shape[-1] - 1
    return buffer.flatten(-2)[..., start : start + queries * width].unflatten(-1, (queries, width))
