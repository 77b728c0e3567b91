"""Attention masks: the keys that each query may attend to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlxf.attention.patterns.base import Pattern
from rlxf.attention.relative import DistanceTables, RelativeDistances, covered_distances, is_aligned
from rlxf.attention.sparse.plan import HeadGroup, has_keys, plan_sparse
from rlxf.attention.token_index import (
    EMPTY,
    TokenIndex,
    is_tracing,
    none_if_all_false,
    uncompiled,
    unrecorded,
)

T = TypeVar("T")


class SharedPosition(Protocol):
    """Part of a position technique that all layers share; see `PositionEmbedding`."""

    @property
    def gather_cost(self) -> float:
        """Cost of a pair with gathered keys, relative to its cost where all pairs are computed."""

    def table(self, distances: Tensor, causal: bool) -> Tensor | None:
        """Return a table over distances (R,) that all layers share; None for none."""

    def bias(self, mask: "AttentionMask") -> Tensor | None:
        """Return a term that is added to the scores of every layer, (B or 1, H, Tq, Tk); None for none."""


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Attention mask of Tq queries over Tk keys, computed once for all layers with the same pattern.

    `relative` holds distances for relative positions, and `sparse_plan` block groups for long sequences. Both
    are computed on first use.

    Args:
        query: index of the queries, (B, Tq).
        key: index of the keys, (B, Tk).
        pattern: attention pattern, a rule on positions.
        causal: whether future keys are masked.
        dtype: floating-point type of the mask.
        position: position module that is shared by all layers; None for none.
        tables: precomputed distance tables, for acting; None computes the tables that this pass needs.
        query_slice: tokens of the segment that are queries; None for all.
        heads: number of heads with attention weights H; patterns may differ by head.
        maps: number of successive heads with one pattern: the attention maps of one head of the transformer.
    """

    query: TokenIndex
    key: TokenIndex
    pattern: Pattern
    causal: bool
    dtype: torch.dtype
    position: SharedPosition | None = None
    tables: DistanceTables | None = None
    query_slice: slice | None = None
    heads: int = 1
    maps: int = 1

    def select_queries(self, tokens: slice | None) -> "AttentionMask":
        """Restrict the mask to some of the queries, over all keys; None selects all queries."""
        return self if tokens is None else replace(self, query=self.query.at(tokens), query_slice=tokens)

    def queries(self, x: Tensor) -> Tensor:
        """Select the tokens of a segment (B, T, C) that are queries, (B, Tq, C)."""
        return x if self.query_slice is None else x[:, self.query_slice]

    @cached_property
    def query_masks(self) -> "tuple[AttentionMask, ...]":
        """One mask for each of the pattern's `query_rules`."""
        return tuple(replace(self, pattern=rule) for rule in self.pattern.query_rules)

    @cached_property
    def distance(self) -> Tensor:
        """Position of the query minus position of the key: (B, Tq, Tk) int64."""
        return self.query.position[:, :, None] - self.key.position[:, None, :]

    @property
    def query_in_memory(self) -> Tensor:
        """Position of each query from which `distance` counts to `moved_keys`: (B, Tq) int64."""
        return self.query.position

    @cached_property
    def moved_keys(self) -> Tensor | None:
        """Keys whose distance is not that of positions in the episode, (B, Tk) bool; None if there are none.

        A memory that closes the gap before its first tokens moves them towards the query.
        """
        return None

    @cached_property
    def head_patterns(self) -> dict[Pattern, list[int]]:
        """Distinct patterns of the heads, and the heads that use each; all heads if there is one pattern."""
        heads: dict[Pattern, list[int]] = {}
        for head, pattern in enumerate(self.pattern.for_heads(self.heads // self.maps)):
            heads.setdefault(pattern, []).extend(range(head * self.maps, (head + 1) * self.maps))
        return heads

    @cached_property
    def allowed_by_head(self) -> Tensor:
        """Boolean attention mask (B, 1 or H, Tq, Tk), True where the query may attend to the key.

        Both tokens are in the same episode and the pattern allows the pair. If causal, the key is not later.
        """
        same = self.query.shares_episode(self.key)
        if self.causal:
            same &= self.distance >= 0
        i, j = self.query.filled_position[:, :, None], self.key.filled_position[:, None, :]
        if len(self.head_patterns) == 1:
            return (same & next(iter(self.head_patterns)).mask_mod(i, j))[:, None]
        allowed = {
            head: pattern.mask_mod(i, j) for pattern, heads in self.head_patterns.items() for head in heads
        }
        return torch.stack([same & allowed[head] for head in range(self.heads)], dim=1)

    @property
    def allowed(self) -> Tensor:
        """Union of `allowed_by_head` over the heads: (B, Tq, Tk) bool."""
        allowed = self.allowed_by_head
        return allowed[:, 0] if allowed.shape[1] == 1 else allowed.any(1)

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
    def fully_masked_by_head(self) -> Tensor | None:
        """Fully masked queries by head: (B, 1 or H, Tq) bool; None if there are none, see
        `none_if_all_false`.
        """
        empty = self.query.episode == EMPTY
        return none_if_all_false(empty[:, None] if self._self_visible else ~self.allowed_by_head.any(-1))

    @cached_property
    def fully_masked(self) -> Tensor | None:
        """Queries that are fully masked in all heads: (B, Tq) bool; None if there are none."""
        if not self._self_visible and self.sparse_plan is not None:
            masked = ~has_keys(self.sparse_plan, self.query)
        elif self.fully_masked_by_head is None:
            return None
        else:
            masked = self.fully_masked_by_head.all(1)
        return none_if_all_false(masked)

    @cached_property
    def _self_visible(self) -> bool:
        """Return whether every query is also a key, and every pattern allows it to attend to itself.

        The check costs a sort instead of the full mask. It is skipped where pairs are few, while acting, and
        where an accelerator would have to be read for it.
        """
        if self.tables is not None or is_tracing():
            return False
        if not (self.query.known_on_cpu and self.key.known_on_cpu) and self.sparse_plan is None:
            return False
        return _attend_to_themselves(self.query, self.key, tuple(self.head_patterns))

    def zero_masked_rows(self, x: Tensor) -> Tensor:
        """Set the rows of x (B, H, Tq, N) to 0 where the query is fully masked in the head."""
        masked = self.fully_masked_by_head
        return x if masked is None else x.masked_fill(masked[..., None], 0.0)

    @cached_property
    def bias(self) -> Tensor | None:
        """Bias that is added to the scores of every layer, (B or 1, H, Tq, Tk); None for none."""
        return None if self.position is None else self.position.bias(self)

    @cached_property
    def aligned(self) -> bool:
        """Return whether distances of tokens are distances of slots; see `is_aligned`."""
        return not is_tracing() and is_aligned(self.query, self.key)

    @property
    def hides_future(self) -> bool:
        """Return whether all keys after a query are masked."""
        return self.causal

    @cached_property
    def relative(self) -> RelativeDistances:
        """Distances of the pairs, and lookups in tables of distances."""
        pairs = None if self.aligned else self.distance
        size = (self.query.shape[1], self.key.shape[1])
        if self.tables is not None:
            tables = self.tables
            return RelativeDistances(tables.distances, tables.shared, tables.largest, *size, pairs)
        return uncompiled(self._visible_distances)(*size, pairs)

    def _visible_distances(self, queries: int, keys: int, pairs: Tensor | None) -> RelativeDistances:
        """Return `RelativeDistances` over all distances that visible pairs may have."""
        visible = None if pairs is None or is_tracing() else pairs[self.allowed]
        farthest = self.pattern.max_distance
        covered = covered_distances(self.query, self.key, visible, farthest, self.hides_future)
        distances = torch.arange(covered[0], covered[-1] - 1, -1, device=self.key.position.device)
        return RelativeDistances(distances, self.shared_table(distances), covered[0], queries, keys, pairs)

    def shared_table(self, distances: Tensor) -> Tensor | None:
        """Return the table of the position encoding over distances (R,), shared by all layers."""
        return None if self.position is None else self.position.table(distances, self.causal)

    @cached_property
    def sparse_plan(self) -> tuple[HeadGroup, ...] | None:
        """Block groups of queries and keys for sparse attention; None where dense attention is faster."""
        if self.tables is not None or is_tracing():
            return None
        cost = 1.0 if self.position is None else self.position.gather_cost
        return plan_sparse(self.query, self.key, self.head_patterns, self.causal, cost)

    def once(self, compute: "Callable[[AttentionMask], T]") -> T:
        """Return ``compute(self)``, computed once: a value that all layers with this mask share."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        return self._computed[compute]

    @cached_property
    def _computed(self) -> dict[Callable[..., Any], Any]:
        """Results of `once`."""
        return {}


@unrecorded
def _attend_to_themselves(query: TokenIndex, key: TokenIndex, patterns: Iterable[Pattern]) -> bool:
    """Return whether every query (B, Tq) is also a key (B, Tk) and may attend to itself in all patterns."""
    query = query.on_cpu
    position = query.filled_position
    filled = query.episode != EMPTY
    visible = filled & (key.on_cpu.find(query) >= 0)
    for pattern in patterns:
        visible &= pattern.mask_mod(position, position)
    return bool((visible == filled).all())
