"""Multi-head attention: projections around a position, a kernel and a relation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.gathering import as_rows, pick, put_back
from rlxf.attention.index import Index
from rlxf.attention.kernels.base import Kernel, LayerMemory, LayerRecurrent, Linear
from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.positions.base import LayerPosition, PairwisePosition, Position
from rlxf.attention.relation import Gathered, Relation, Share, Tables

Projected = tuple[Tensor, ...]
"""Keys and values, (B, H, S, D) each, and the keys' marks (B, H, S, F) if the kernel reads some."""


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Keys and values of one layer in a ring of S slots, and its table of distances.

    Args:
        keys: (B, H, S, D + F), with their marks.
        values: (B, H, S, D).
        table: what the layer's position makes of the distances, or None.
    """

    keys: Tensor
    values: Tensor
    table: Tensor | None

    def write(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Put k and v, (B, H, 1, D + F) and (B, H, 1, D), into a slot, in place."""
        self.keys[:, :, slot : slot + 1] = k
        self.values[:, :, slot : slot + 1] = v

    def rows(self, rows: Tensor) -> "LayerCache":
        """A copy of the chosen rows (N,) int64 of the batch."""
        return LayerCache(self.keys.index_select(0, rows), self.values.index_select(0, rows), self.table)

    def copy(self) -> Self:
        """A copy of the ring; all else is shared."""
        return replace(self, keys=self.keys.clone(), values=self.values.clone())


class Attention(nn.Module):
    """``out(kernel(q, k, v))`` with H heads of D = C / H features.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2. Each of the projections of q, k
    and v starts orthogonal by itself.

    Args:
        width: features of a token C.
        heads: number of heads H.
        position: how order enters the scores; None for not at all.
        kernel: how the weighted average is computed.
        dropout: probability with which an attention weight is set to 0 in training.
    """

    def __init__(self, width: int, heads: int, position: Position | None, kernel: Kernel, dropout: float):
        super().__init__()
        self.width, self.heads, self.size = width, heads, width // heads
        self.qkv = orthogonal_linear(width, width, matrices=3)
        self.out: nn.Module = orthogonal_linear(width, width)
        self.position = position.build(width, heads) if position else LayerPosition()
        self.pairwise = isinstance(position, PairwisePosition)
        self.kernel = kernel.build(width, heads)
        self.heads_differ = bool(self.kernel.state_dict())  # by weights of their own
        self.dropout = dropout

    def forward(self, x: Tensor, memory: Projected | None, relation: Relation) -> Tensor:
        """Queries of x (B, T, C) over memory, keys and values (B, H, M, D), and x -> (B, Tq, C)."""
        q, k, v = self.read(x, memory, relation)
        return self._joined(self.averaged(q, k, v, relation), relation)

    def averaged(self, q: Tensor, k: Tensor, v: Tensor, relation: Relation) -> Tensor:
        """`average` in a pass: group by group where that is faster."""
        shares = self.kernel.shares(relation)
        if shares is None:
            return self.average(q, k, v, relation, self._table(relation))
        q, k = self.kernel.meet(q, k, relation)
        return self._in_parts(q, k, v, shares)

    def weights(self, x: Tensor, memory: Projected | None, relation: Relation) -> Tensor:
        """The weights that `forward` averages values with, (B, H, T, M + T).

        Row i holds what query i takes of each key.
        """
        q, k, _ = self.read(x, memory, relation)
        q, k = self.kernel.meet(q, k, relation)
        bias, q = self._biased(q, k, relation, self._table(relation))
        weights = self.kernel.look(q, k, bias, relation, self._dropout)
        return (
            weights
            if relation.blind_by_head is None
            else weights.masked_fill(relation.blind_by_head[..., None], 0.0)
        )

    def cross(self, x: Tensor, context: Projected, relation: Relation) -> Tensor:
        """Queries of x (B, T, C) over projected keys and values (B, H, N, D) -> (B, T, C)."""
        keys, values = self.heard(context, relation.key.position)
        return self.attend(self.ask(x), keys, values, relation, None)

    def step(self, x: Tensor, cache: LayerCache | LayerMemory, slot: int, relation: Relation) -> Tensor:
        """Write the token x (B, 1, C) into the cache, then attend over the cache -> (B, 1, C)."""
        q, own = self._among_themselves(x)
        k, v = self.heard(own, relation.query.position)
        if isinstance(cache, LayerMemory):
            return self._recur(q, k, v, cache, relation)
        cache.write(slot, k, v)
        return self.attend(q, cache.keys, cache.values, relation, cache.table)

    def write(self, x: Tensor, cache: LayerCache | LayerMemory, slot: int, relation: Relation) -> None:
        """`step` of a token x (B, 1, C) that does not ask."""
        if isinstance(cache, LayerMemory):
            self.step(x, cache, slot, relation)
            return
        cache.write(slot, *self.heard(self.project(x), relation.query.position))

    def _recur(self, q: Tensor, k: Tensor, v: Tensor, memory: LayerMemory, relation: Relation) -> Tensor:
        """`step` for a recurrent kernel, which remembers a token by more than a slot."""
        assert isinstance(self.kernel, LayerRecurrent)
        _, q = self._biased(q, k, relation, None)
        return self._joined(self.kernel.recur(q, k, v, relation.query, memory), relation)

    def remember(self, memory: Projected, index: Index) -> LayerMemory:
        """What a recurrent kernel keeps of keys and values of memory, (B, H, S, D), for all steps to come."""
        assert isinstance(self.kernel, LayerRecurrent)
        return self.kernel.begin(*self.heard(memory, index.position), index)

    def cache(self, memory: Projected, index: Index, tables: Tables) -> LayerCache:
        """Keep the keys and values of memory, (B, H, S, D), for many steps."""
        k, v = self.heard(memory, index.position)
        table = self.position.table(tables.distances, tables.shared)
        return LayerCache(k.contiguous(), v.contiguous(), table)

    @property
    def reach(self) -> int:
        """Beyond this distance, in tokens, no key has any weight."""
        return self.kernel.reach

    def attend(self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, table: Tensor | None) -> Tensor:
        """q (B, H, Tq, D) over k and v (B, H, Tk, D) -> (B, Tq, C). Who sees nothing gets 0."""
        return self._joined(self.average(q, k, v, relation, table), relation)

    def average(self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, table: Tensor | None) -> Tensor:
        """What each head finds: q (B, H, Tq, D) over k and v (B, H, Tk, D) -> (B, H, Tq, D)."""
        q, k = self.kernel.meet(q, k, relation)
        bias, q = self._biased(q, k, relation, table)
        mixed = self.position.average(self.kernel, q, k, v, bias, relation, table, self._dropout)
        if len(relation.rules) > 1 and relation.blind_by_head is not None:
            mixed = mixed.masked_fill(relation.blind_by_head[..., None], 0.0)
        return mixed

    def _in_parts(self, q: Tensor, k: Tensor, v: Tensor, shares: Sequence[Share]) -> Tensor:
        """What q (B, H, Tq, D) gets of k and v (B, H, Tk, D), group by group: (B, H, Tq, D)."""
        rows = [as_rows(x) for x in (q, k, v)]
        parts = [[self._part(rows, gathered, share.heads) for gathered in share.parts] for share in shares]
        return put_back(shares, parts, like=q[..., : v.shape[-1]])

    def _part(self, rows: Sequence[Tensor], relation: Gathered, heads: slice | list[int]) -> Tensor:
        """What N groups of G queries get in some of the heads, (N, heads, G, D).

        A position that scores pairs and a kernel with weights are asked for all heads; without, no more than
        needed is gathered.
        """
        query, key = relation.part.query, relation.part.key
        averaged = slice(None) if self.heads_differ else heads
        wanted = slice(None) if self.pairwise else averaged
        q, k = pick(rows[0][:, wanted], query), pick(rows[1][:, wanted], key)
        v, table = pick(rows[2][:, averaged], key), self._table(relation)
        bias, q = self._biased(q, k, relation, table)
        if self.pairwise:
            q, k, bias = q[:, averaged], k[:, averaged], bias if bias is None else bias[:, averaged]
        mixed = self.position.average(self.kernel, q, k, v, bias, relation, table, self._dropout)
        mixed = mixed[:, heads] if self.heads_differ else mixed
        blind = relation.blind_by_head
        return mixed if blind is None else mixed.masked_fill(blind[..., None], 0.0)

    def _table(self, relation: Relation) -> Tensor | None:
        """What the position makes of the distances, if it asks for them."""
        return self.position.table(relation.distances, relation.table) if self.pairwise else None

    def _biased(
        self, q: Tensor, k: Tensor, relation: Relation, table: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """What the position adds to the scores, and q as it meets the keys. Marks are not for positions."""
        size = self.size
        asking = q[..., :size]
        bias = self.position.bias(asking, k[..., :size], relation, table)
        asking = self.position.query(asking, relation.query.position)
        return bias, asking if q.shape[-1] == size else torch.cat([asking, q[..., size:]], dim=-1)

    def _joined(self, mixed: Tensor, relation: Relation) -> Tensor:
        """The heads' averages (B, H, Tq, D) -> (B, Tq, C)."""
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y if relation.blind is None else y.masked_fill(relation.blind[..., None], 0.0)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def read(self, x: Tensor, memory: Projected | None, relation: Relation) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, Tq, D) of x (B, T, C); k and v (B, H, M + T, D) of memory (B, H, M, D) and x."""
        if relation.asking is None:
            q, own = self._among_themselves(x)
        else:
            q, own = self.ask(relation.queries(x)), self.project(x)
        if memory is not None:
            own = tuple(torch.cat(pair, dim=2) for pair in zip(memory, own, strict=True))
        return q, *self.heard(own, relation.key.position)

    def _among_themselves(self, x: Tensor) -> tuple[Tensor, Projected]:
        """`ask` and `project` in one product."""
        q, *own = self.split(self.qkv(x))
        return self._marked(q, x), (*own, *self._key_marks(x))

    def heard(self, projected: Projected, position: Tensor) -> tuple[Tensor, Tensor]:
        """The keys as they meet queries, and the values, of tokens that stand at ``position`` (B, S)."""
        k, v, *marks = projected
        notes = self.kernel.key_notes(k)
        k = self.position.key(self.as_key(k), position)
        return _behind(k, *marks, notes), v

    def as_key(self, k: Tensor) -> Tensor:
        """Keys (B, H, S, D) of what was projected for them: the same."""
        return k

    def ask(self, x: Tensor) -> Tensor:
        """Queries of x (B, T, C), (B, H, T, D + E)."""
        width = self.width
        (q,) = self.split(F.linear(x, self.qkv.weight[:width], self.qkv.bias[:width]))
        return self._marked(q, x)

    def project(self, x: Tensor, linear: Linear = F.linear) -> Projected:
        """Keys, values and marks of x (B, T, C).

        Args:
            x: what is looked at.
            linear: ``linear(x, weight, bias)``; a layer whose norm is not yet applied to x brings its own.
        """
        width = self.width
        own = self.split(linear(x, self.qkv.weight[width:], self.qkv.bias[width:]))
        return *own, *self._key_marks(x, linear)

    def _marked(self, q: Tensor, x: Tensor) -> Tensor:
        return _behind(q, self.kernel.query_marks(x), self.kernel.query_notes(q))

    def _key_marks(self, x: Tensor, linear: Linear = F.linear) -> Projected:
        marks = self.kernel.key_marks(x, linear)
        return () if marks is None else (marks,)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, n C) -> n tensors (B, H, T, D)."""
        parts = x.split(self.width, dim=-1)
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)


def _behind(x: Tensor, *marks: Tensor | None) -> Tensor:
    """x (B, H, T, D) and behind its features the marks (B, H, T, E) that there are."""
    found = [one for one in marks if one is not None]
    return torch.cat([x, *found], dim=-1) if found else x
