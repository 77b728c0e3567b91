"""Attention that also finds, among many tokens far back, those whose keys are nearest."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention import Attention, LayerCache, Projected
from rlxf.attention.dropout import dropout as drop_some
from rlxf.attention.kernels.base import Kernel, LayerMemory
from rlxf.attention.memory.far import FarRelation
from rlxf.attention.memory.nearest import NEAREST, Finder
from rlxf.attention.positions.base import Position
from rlxf.attention.relation import Relation
from rlxf.attention.with_faiss import check_index

SCORES = 2**24
"""Scores that are held at a time while the nearest are looked for: 64 MB in float32."""

RARE = 4
"""Where less than one in so many of the tokens may be found by anyone, those are taken out first."""

START = 20.0
"""exp(s) at first, as in public code: scores of unit vectors alone are too even to choose by."""


@dataclass(frozen=True, eq=False)
class FarLayerCache(LayerCache):
    """A `LayerCache`, and room of F slots for tokens that may be far.

    Args:
        far_keys: (B, H, F, D), of unit length, without positions.
        far_values: (B, H, F, D).
    """

    far_keys: Tensor
    far_values: Tensor

    def write_far(self, slot: int, k: Tensor, v: Tensor) -> None:
        """As `write`, into the room for far tokens."""
        self.far_keys[:, :, slot : slot + 1] = k
        self.far_values[:, :, slot : slot + 1] = v

    def rows(self, rows: Tensor) -> "FarLayerCache":
        """See `LayerCache`."""
        some = super().rows(rows)
        far = (x.index_select(0, rows) for x in (self.far_keys, self.far_values))
        return FarLayerCache(some.keys, some.values, some.table, *far)

    def moved(self, kept: slice) -> "FarLayerCache":
        """The same, with a few of the far tokens at the start of other room, as large."""
        far = [torch.zeros_like(self.far_keys), torch.zeros_like(self.far_values)]
        for room, old in zip(far, (self.far_keys, self.far_values), strict=True):
            room[:, :, : kept.stop - kept.start] = old[:, :, kept]
        return FarLayerCache(self.keys, self.values, self.table, *far)


class MemorizingAttention(Attention):
    """The layer of a `KNN` memory that finds far tokens: ``log_scale`` (H,) is s, ``gate`` (H,) is w."""

    def __init__(
        self,
        width: int,
        heads: int,
        position: Position | None,
        kernel: Kernel,
        dropout: float,
        top: int,
        index: Finder = "torch",
    ):
        super().__init__(width, heads, position, kernel, dropout)
        check_index(index)
        self.top = top
        self.nearest = NEAREST[index]
        self.log_scale = nn.Parameter(torch.full((heads,), math.log(START)))
        self.gate = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor, memory: Projected | None, relation: Relation) -> Tensor:
        """See `Attention`; the first keys and values of memory are of the tokens that may be far."""
        far, near = self._parted(memory, relation)
        q, k, v = self.read(x, near, relation)
        return self._joined(self._with_far(q, self.averaged(q, k, v, relation), far, relation), relation)

    def weights(self, x: Tensor, memory: Projected | None, relation: Relation) -> Tensor:
        """See `Attention`: (B, H, T, F + M + T)."""
        (k, _), near = self._parted(memory, relation)
        of_near = super().weights(x, near, relation)
        assert isinstance(relation, FarRelation)
        q = self.ask(relation.queries(x))
        chosen, weight, g = self._nearest(q, k, relation.findable())
        of_far = q.new_zeros(*q.shape[:3], k.shape[2]).scatter(-1, chosen, weight)
        return torch.cat([g * of_far, (1 - g) * of_near], dim=-1)

    def step(self, x: Tensor, cache: LayerCache | LayerMemory, slot: int, relation: Relation) -> Tensor:
        """See `Attention`."""
        assert isinstance(cache, FarLayerCache)
        q, own = self._among_themselves(x)
        self._keep(own, cache, slot, relation)
        near = self.average(q, cache.keys, cache.values, relation, cache.table)
        return self._joined(self._with_far(q, near, (cache.far_keys, cache.far_values), relation), relation)

    def write(self, x: Tensor, cache: LayerCache | LayerMemory, slot: int, relation: Relation) -> None:
        """See `Attention`."""
        assert isinstance(cache, FarLayerCache)
        self._keep(self.project(x), cache, slot, relation)

    def _keep(self, own: Projected, cache: FarLayerCache, slot: int, relation: Relation) -> None:
        assert isinstance(relation, FarRelation)
        cache.write(slot, *self.heard(own, relation.query.position))
        cache.write_far(relation.slot, *self.far(own))

    def far(self, projected: Projected) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens that may be far: without positions and gradient."""
        return self.as_key(projected[0]).detach(), projected[1].detach()

    def as_key(self, k: Tensor) -> Tensor:
        """See `Attention`: of length 1."""
        return F.normalize(k, dim=-1)

    def _marked(self, q: Tensor, x: Tensor) -> Tensor:
        """Queries of such a length that ``q . k / sqrt(D)`` is the scaled cosine."""
        scale = self.log_scale.exp()[:, None, None] * self.size**0.5
        return super()._marked(F.normalize(q, dim=-1) * scale, x)

    def _parted(
        self, memory: Projected | None, relation: Relation
    ) -> tuple[tuple[Tensor, Tensor], Projected]:
        """What may be far, and what is near, of the keys and values of memory."""
        assert memory is not None
        assert isinstance(relation, FarRelation)
        count = relation.far.shape[1]
        far = tuple(part[:, :, :count] for part in memory)
        return self.far(far), tuple(part[:, :, count:] for part in memory)

    def _with_far(self, q: Tensor, near: Tensor, far: tuple[Tensor, Tensor], relation: Relation) -> Tensor:
        """``g o_far + (1 - g) o_near``: near (B, H, Tq, D), far keys and values (B, H, F, D).

        Some queries at a time: what lies between all of them and thousands of tokens is too much to hold.
        """
        assert isinstance(relation, FarRelation)
        if not far[0].shape[2]:
            return near
        size = max(1, SCORES // far[0][..., 0].numel())
        stretches = (slice(start, start + size) for start in range(0, q.shape[2], size))
        mixed = [self._mixed(q[:, :, s], near[:, :, s], far, relation.findable(s)) for s in stretches]
        return torch.cat(mixed, dim=2)

    def _mixed(self, q: Tensor, near: Tensor, far: tuple[Tensor, ...], found: Tensor) -> Tensor:
        """The same for all queries at once, given what they may find, (B, Tq, F)."""
        columns = found.flatten(0, 1).any(0).nonzero()[:, 0]
        if RARE * len(columns) < found.shape[-1]:
            far, found = tuple(part[:, :, columns] for part in far), found[..., columns]
        keys, values = far
        chosen, weight, g = self._nearest(q, keys, found)
        o = (weight[..., None] * picked(values, chosen)).sum(-2)
        return g * o + (1 - g) * near

    def _nearest(self, q: Tensor, keys: Tensor, found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which k keys have the largest scores; their softmax, 0 where not found; and the gate.

        The first two are (B, H, Tq, k), the gate (B, H, Tq, 1), 0 for queries that have nothing to find.
        """
        with torch.no_grad():
            chosen = self.nearest(q, keys, found, self.top)
        seen = found[:, None].expand(-1, q.shape[1], -1, -1).gather(-1, chosen)
        scores = (q[..., None, :] * picked(keys, chosen)).sum(-1) * self.size**-0.5
        weight = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
        g = self.gate.sigmoid()[:, None, None] * seen.any(-1, keepdim=True)
        return chosen, drop_some(weight * seen, self._dropout), g


def picked(x: Tensor, chosen: Tensor) -> Tensor:
    """Of x (B, H, F, D) those chosen (B, H, Tq, k): (B, H, Tq, k, D)."""
    slots = chosen.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, slots).unflatten(2, chosen.shape[2:])
