"""Who may see whom, and from how far: what queries and keys are to one another."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlxf.attention.index import EMPTY, Index
from rlxf.attention.patterns.base import Pattern


@dataclass(frozen=True, eq=False)
class Relation:
    """Distances and permissions between Tq queries and Tk keys, computed once for all layers.

    Args:
        query: index of the queries, (B, Tq).
        key: index of the keys, (B, Tk).
        pattern: which keys a query may see by its position.
        causal: whether keys ahead of the query are hidden.
        dtype: floating type of the mask.
        tabled: (R,) int64, the `distances` of tables made before; None: those that this pass needs.
    """

    query: Index
    key: Index
    pattern: Pattern
    causal: bool
    dtype: torch.dtype
    tabled: Tensor | None = None

    @cached_property
    def distance(self) -> Tensor:
        """(B, Tq, Tk) int64: position of the query minus position of the key."""
        return self.query.position[:, :, None] - self.key.position[:, None, :]

    @cached_property
    def allowed(self) -> Tensor:
        """(B, Tq, Tk) bool: same episode, slot not empty, allowed by the pattern, not ahead."""
        same = self.query.episode[:, :, None] == self.key.episode[:, None, :]
        allowed = same & (self.key.episode != EMPTY)[:, None, :]
        allowed &= self.pattern.allows(self.query.position[:, :, None], self.key.position[:, None, :])
        return allowed & (self.distance >= 0) if self.causal else allowed

    @cached_property
    def blind(self) -> Tensor | None:
        """(B, Tq) bool: queries that see no key at all; None if there is none."""
        blind = ~self.allowed.any(-1)
        return blind if bool(blind.any()) else None

    @cached_property
    def mask(self) -> Tensor:
        """(B, 1, Tq, Tk): 0 where allowed, -inf elsewhere; 0 in blind rows, lest softmax be nan."""
        allowed = self.allowed if self.blind is None else self.allowed | self.blind[..., None]
        return torch.where(allowed, 0.0, -torch.inf).to(self.dtype)[:, None]

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
        if self.tabled is not None:
            return self.tabled
        back, ahead = (self.key.shape[1] - 1, self.query.shape[1] - 1)
        if not self.aligned:
            seen = self.distance[self.allowed]
            back = int(seen.max()) if seen.numel() else 0
            ahead = -int(seen.min()) if seen.numel() else 0
        back = max(0, min(back, self.pattern.reach))
        ahead = 0 if self.causal else max(0, min(ahead, self.pattern.reach))
        return torch.arange(back, -ahead - 1, -1, device=self.key.position.device)

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
        scores = _by_head(q, table)
        if self.aligned:
            return self._shifted(scores, int(self.distances[0]))
        return scores.gather(-1, self._columns.expand(-1, q.shape[1], -1, -1))

    def _shifted(self, scores: Tensor, back: int) -> Tensor:
        """Transformer-XL's relative shift (Dai et al. 2019, appendix B) for any window.

        Row i has to move i columns to the right. Rows of N + 1 numbers read as rows of N do that.
        """
        left = max(0, self._offset - back)
        shifted: Tensor = _Shift.apply(scores, left, left + back - self._offset, self.key.shape[1])  # type: ignore[no-untyped-call]
        return shifted


def _by_head(q: Tensor, table: Tensor) -> Tensor:
    """q (B, H, T, D), table (H, D, R) -> (B, H, T, R); ``@`` alone would copy the table for every row."""
    rows = q.transpose(0, 1).flatten(1, 2)
    return (rows @ table).unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)


class _Shift(torch.autograd.Function):
    """Scores (B, H, T, R) from column ``left`` on in rows of N + 1, read as rows of N from ``start`` on.

    torch's own padding and slices would do; their gradients fill more buffers of this size with zeros.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, left: int, start: int, keys: int) -> Tensor:
        columns = slice(left, left + scores.shape[-1])
        ctx.columns, ctx.start, ctx.width = columns, start, max(keys, columns.stop)
        whole = scores.new_zeros(*scores.shape[:-1], ctx.width + 1)
        whole[..., columns] = scores
        return _shifted_rows(whole, start)[..., :keys]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        whole = gradient.new_zeros(*gradient.shape[:-1], ctx.width + 1)
        _shifted_rows(whole, ctx.start)[..., : gradient.shape[-1]] = gradient
        return whole[..., ctx.columns], None, None, None


def _shifted_rows(whole: Tensor, start: int) -> Tensor:
    """Rows of N + 1 numbers, (B, H, T, N + 1), read as rows of N from ``start`` on: a view."""
    queries, width = whole.shape[-2], whole.shape[-1] - 1
    return whole.flatten(-2)[..., start : start + queries * width].unflatten(-1, (queries, width))
