"""Relative distances between queries and keys, and lookups in tables of distances."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.token_index import TokenIndex, is_recording, unrecorded

MOST_PADDING = 4
"""Largest ratio of the columns of a padded table to those of the table; products with 0 take time, too."""


@dataclass(frozen=True, eq=False)
class DistanceTables:
    """Distance tables that are computed once per pass, or once for many acting steps.

    Args:
        distances: (R,) int64, descending; keys after the query have negative distances.
        shared: table of the position encoding over ``distances`` for all layers; None for none.
        largest: first of the ``distances``, known without reading them.
    """

    distances: Tensor
    shared: Tensor | None
    largest: int


@dataclass(frozen=True, eq=False)
class RelativeDistances(DistanceTables):
    """Distances between Tq queries and Tk keys, and the conversion between distances and keys.

    In an aligned pass the distance of two tokens equals the distance of their slots. Scores by distance then
    become scores by key through a shifted view (relative shift) instead of a gather.

    Args:
        distances: see `DistanceTables`; tables have one column for each.
        shared: see `DistanceTables`.
        largest: see `DistanceTables`.
        queries: Tq.
        keys: Tk.
        pairs: distance of each pair, (B, Tq, Tk) int64; None in an aligned pass.
    """

    queries: int
    keys: int
    pairs: Tensor | None

    @property
    def _offset(self) -> int:
        """Number of memory slots before the first query, if the queries are the last keys."""
        return self.keys - self.queries

    @cached_property
    def _columns(self) -> Tensor:
        """Column in `distances` of each query-key pair, (B, 1, Tq, Tk); arbitrary where masked."""
        assert self.pairs is not None
        columns: Tensor = self.distances[0] - self.pairs
        return columns.clamp_(0, self.distances.shape[0] - 1)[:, None]

    def scores(self, q: Tensor, table: Tensor) -> Tensor:
        """Compute ``q_i . table[distance(i, j)]`` for each query and key; arbitrary where masked.

        In a compiled program, the relative shift is a view of the scores of a table that is padded with 0,
        and its gradient one copy. Without a compiler, products with these zeros take longer than the copies
        that they save.

        Args:
            q: queries, (B, H, Tq, D).
            table: (H, D, R), one column per entry of `distances`.

        Returns:
            (B, H, Tq, Tk).
        """
        first, size = self.largest - self._offset, table.shape[-1]
        left = max(0, -first)
        width = max(self.keys, left + size) + 1
        if self.pairs is not None or width > MOST_PADDING * size or not is_recording():
            return self.distance_to_key(_by_head(q, table))
        padded = F.pad(table, (left, width - left - size))
        return _ShiftedView.apply(_by_head(q, padded), left + first, self.keys)  # type: ignore[no-untyped-call]

    def key_scores(self, k: Tensor, table: Tensor) -> Tensor:
        """Compute ``k_j . table[distance(i, j)]`` for keys k (B, H, Tk, D); otherwise like `scores`."""
        scores = _by_head(k, table.flip(-1))
        if self.pairs is None:
            max_future = self.distances.shape[0] - 1 - self.largest
            return _shift(scores, self._offset + max_future, self.queries).transpose(-1, -2)
        columns = self.distances.shape[0] - 1 - self._columns.transpose(-1, -2)
        return scores.gather(-1, columns.expand(-1, k.shape[1], -1, -1)).transpose(-1, -2)

    def lookup(self, table: Tensor) -> Tensor:
        """Look up ``table[distance(i, j)]``: table (H, R) -> (B or 1, H, Tq, Tk); arbitrary where masked."""
        return self.distance_to_key(table[None, :, None].expand(-1, -1, self.queries, -1))

    def distance_to_key(self, scores: Tensor) -> Tensor:
        """Convert scores by distance (B or 1, H, Tq, R) to (B or 1, H, Tq, Tk); arbitrary where masked."""
        if self.pairs is None:
            return _shift(scores, self.largest - self._offset, self.keys)
        columns = self._columns.expand(-1, scores.shape[1], -1, -1)
        return scores.expand(columns.shape[0], -1, -1, -1).gather(-1, columns)

    def key_to_distance(self, weights: Tensor) -> Tensor:
        """Sum weights (B, H, Tq, Tk), 0 where masked, by distance -> (B, H, Tq, R)."""
        size = self.distances.shape[0]
        if self.pairs is None:
            return _Unshift.apply(weights, self.largest - self._offset, size)  # type: ignore[no-untyped-call]
        columns = self._columns.expand(-1, weights.shape[1], -1, -1)
        return weights.new_zeros(*weights.shape[:-1], size).scatter_add(-1, columns, weights)


@dataclass(frozen=True, eq=False)
class DistinctDistances(RelativeDistances):
    """`RelativeDistances` whose tables cover an arbitrary set of distances, for gathered keys."""

    @cached_property
    def _columns(self) -> Tensor:
        assert self.pairs is not None
        ascending = self.distances.flip(0)
        rank = torch.searchsorted(ascending, self.pairs).clamp_(max=len(ascending) - 1)
        return (len(ascending) - 1 - rank)[:, None]


@unrecorded
def is_aligned(query: TokenIndex, key: TokenIndex) -> bool:
    """Return whether the distance of two tokens of one episode equals the distance of their slots.

    True if the queries are the last keys of a contiguous segment, with any episode boundaries.
    """
    queries = query.shape[1]
    if queries == 1 or key.shape[1] < queries:
        return False
    query, key = query.on_cpu, key.on_cpu
    last = key.last(queries)
    same = torch.equal(query.position, last.position)
    return same and torch.equal(query.episode, last.episode) and key.contiguous


def covered_distances(
    query: TokenIndex, key: TokenIndex, visible: Tensor | None, max_distance: int, causal: bool
) -> range:
    """Return all distances that visible pairs may have, descending.

    Args:
        query: index of the queries, (B, Tq).
        key: index of the keys, (B, Tk).
        visible: distances of the visible pairs, (N,); None in an aligned pass.
        max_distance: largest distance that the pattern allows, in tokens.
        causal: whether future keys are masked.
    """
    past, future = key.shape[1] - 1, query.shape[1] - 1
    if visible is not None:
        past, future = (int(visible.max()), -int(visible.min())) if visible.numel() else (0, 0)
    past = max(0, min(past, max_distance))
    future = 0 if causal else max(0, min(future, max_distance))
    return range(past, -future - 1, -1)


def distinct_distances(visible: Tensor) -> Tensor:
    """Return the distinct distances of visible pairs (N,): (R,) int64, descending; 0 if there are none."""
    if not visible.numel():
        return visible.new_zeros(1)
    least = visible.min()
    present = torch.zeros(int(visible.max() - least) + 1, dtype=torch.bool, device=visible.device)
    present[visible - least] = True
    return present.nonzero()[:, 0].flip(0) + least


def _by_head(q: Tensor, table: Tensor) -> Tensor:
    """Multiply q (B, H, T, D) by table (H, D, R) -> (B, H, T, R), without a copy of the table per row."""
    rows = q.transpose(0, 1).flatten(1, 2)
    return (rows @ table).unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)


def _shift(scores: Tensor, first: int, columns: int) -> Tensor:
    """Apply the relative shift of Transformer-XL (Dai et al. 2019, appendix B) for any window.

    ``out[i, j] = scores[i, j + first - i]`` for j < columns: row i moves i columns to the right.
    """
    return _Shift.apply(scores, first, columns)  # type: ignore[no-untyped-call]


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


class _ShiftedView(torch.autograd.Function):
    """View of rows of N + 1 numbers, (B, H, T, N + 1), as rows of N, of which the first ``columns`` are kept.

    The gradient has the order of the results of `_by_head`: head by head.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, start: int, columns: int) -> Tensor:
        ctx.arguments = (start, scores.shape[-1])
        return _shifted_rows(scores, start)[..., :columns]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        start, width = ctx.arguments
        missing = width - 1 - gradient.shape[-1]
        rows = (F.pad(gradient, (0, missing)) if missing else gradient).transpose(0, 1)
        flat = F.pad(rows.flatten(-2), (start, rows.shape[2] - start))
        return flat.unflatten(-1, (-1, width)).transpose(0, 1), None, None


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
    right = left + x.shape[-1]
    buffer = x.new_empty(*x.shape[:-1], max(columns, right) + 1)
    buffer[..., :left] = 0
    buffer[..., left:right] = x
    buffer[..., right:] = 0
    return _shifted_rows(buffer, left + first)[..., :columns]


def _shift_left(x: Tensor, first: int, columns: int) -> Tensor:
    left = max(0, -first)
    buffer = x.new_empty(*x.shape[:-1], max(x.shape[-1], left + columns) + 1)
    rows = _shifted_rows(buffer, left + first)
    start = left + first
    rows[..., : x.shape[-1]] = x
    rows[..., x.shape[-1] :] = 0
    edges = buffer.flatten(-2)
    edges[..., :start] = 0
    edges[..., start + rows.shape[-2] * rows.shape[-1] :] = 0
    return buffer[..., left : left + columns]


def _shifted_rows(buffer: Tensor, start: int) -> Tensor:
    """View rows of N + 1 numbers, (B, H, T, N + 1), as rows of N, from flat offset ``start``."""
    queries = buffer.shape[-2]
    width = buffer.shape[-1] - 1
    return buffer.flatten(-2)[..., start : start + queries * width].unflatten(-1, (queries, width))
