"""Who may see whom, and from how far: what queries and keys are to one another."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
    """

    query: Index
    key: Index
    pattern: Pattern
    causal: bool
    dtype: torch.dtype

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
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, -torch.inf)[:, None]

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
        """(R,) int64: every distance that is needed, from the farthest back down to 0 or ahead."""
        back, ahead = (self.key.shape[1] - 1, self.query.shape[1] - 1)
        if not self.aligned:
            seen = self.distance[self.allowed]
            back = int(seen.max()) if seen.numel() else 0
            ahead = -int(seen.min()) if seen.numel() else 0
        back = max(0, min(back, self.pattern.reach))
        ahead = 0 if self.causal else max(0, min(ahead, self.pattern.reach))
        return torch.arange(back, -ahead - 1, -1, device=self.key.position.device)

    def scores(self, q: Tensor, table: Tensor, distances: Tensor) -> Tensor:
        """``q_i . table[distance(i, j)]`` for each query and key; anything where not allowed.

        Args:
            q: (B, H, Tq, D).
            table: (H, D, R), one column for each of ``distances``.
            distances: (R,) descending in steps of one.

        Returns:
            (B, H, Tq, Tk).
        """
        if self.aligned:
            return self._shifted(q, table, int(distances[0]))
        column = (distances[0] - self.distance).clamp(0, distances.shape[0] - 1)
        return (q @ table).gather(-1, column[:, None].expand(-1, q.shape[1], -1, -1))

    def _shifted(self, q: Tensor, table: Tensor, back: int) -> Tensor:
        """Transformer-XL's relative shift (Dai et al. 2019, appendix B) for any window.

        Row i has to move i columns to the right. Rows of N + 1 numbers read as rows of N do that.
        The table is widened to N + 1 columns, so that no score has to be copied.
        """
        keys, columns = self.key.shape[1], table.shape[-1]
        left = max(0, self._offset - back)
        width = max(keys, left + columns)
        widened = F.pad(table, (left, width + 1 - left - columns))
        shifted: Tensor = _Shift.apply(q @ widened, left + back - self._offset)  # type: ignore[no-untyped-call]
        return shifted[..., :keys]


class _Shift(torch.autograd.Function):
    """Rows of N + 1 numbers, (B, H, T, N + 1), read as rows of N from ``start`` on: a view.

    torch's own slices would do; their gradients fill two buffers of this size with zeros.
    """

    @staticmethod
    def forward(ctx: Any, score: Tensor, start: int) -> Tensor:
        ctx.start = start
        queries, width = score.shape[-2], score.shape[-1] - 1
        rows = score.flatten(-2)[..., start : start + queries * width]
        return rows.unflatten(-1, (queries, width))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        *batch, queries, width = gradient.shape
        whole = gradient.new_empty(*batch, queries * (width + 1))
        whole[..., : ctx.start] = 0
        whole[..., ctx.start + queries * width :] = 0
        whole[..., ctx.start : ctx.start + queries * width] = gradient.flatten(-2)
        return whole.unflatten(-1, (queries, width + 1)), None
