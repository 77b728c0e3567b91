"""Multi-head attention: projections around a position, a kernel and a relation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.gathering import as_rows, pick, put_back
from rlxf.attention.index import Index
from rlxf.attention.kernels.base import Kernel
from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.positions.base import LayerPosition, PairwisePosition, Position
from rlxf.attention.relation import Gathered, Relation, Share, Tables

Projected = tuple[Tensor, ...]
"""Keys and values, (B, H, S, D) each."""
Linear = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Keys and values of one layer in a ring of S slots, and its table of distances.

    Args:
        keys: (B, H, S, D).
        values: (B, H, S, D).
        table: what the layer's position makes of the distances, or None.
    """

    keys: Tensor
    values: Tensor
    table: Tensor | None

    def write(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Put k and v (B, H, 1, D) into a slot, in place."""
        self.keys[:, :, slot : slot + 1] = k
        self.values[:, :, slot : slot + 1] = v

    def rows(self, rows: Tensor) -> "LayerCache":
        """A copy of the chosen rows (N,) int64 of the batch."""
        return LayerCache(self.keys.index_select(0, rows), self.values.index_select(0, rows), self.table)


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
        self.width, self.heads = width, heads
        self.qkv = orthogonal_linear(width, width, matrices=3)
        self.out: nn.Module = orthogonal_linear(width, width)
        self.position = position.build(width, heads) if position else LayerPosition()
        self.pairwise = isinstance(position, PairwisePosition)
        self.kernel = kernel
        self.dropout = dropout

    def forward(self, x: Tensor, memory: Projected | None, relation: Relation) -> Tensor:
        """Queries of x (B, T, C) over memory, keys and values (B, H, M, D), and x -> (B, Tq, C)."""
        q, k, v = self.read(x, memory, relation)
        if relation.shares is not None:
            return self._joined(self._in_parts(q, k, v, relation.shares), relation)
        return self.attend(q, k, v, relation, self.position.table(relation.distances, relation.table))

    def weights(self, x: Tensor, memory: Projected | None, relation: Relation) -> Tensor:
        """The weights that `forward` averages values with, (B, H, T, M + T).

        Row i holds what query i takes of each key: the kernel's average of one-hot values.
        """
        q, k, _ = self.read(x, memory, relation)
        one_hot = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        table = self.position.table(relation.distances, relation.table)
        bias = self.position.bias(q, k, relation, table)
        q = self.position.query(q, relation.query.position)
        weights = self.kernel(q, k, one_hot, bias, relation.mask, self._dropout)
        return (
            weights
            if relation.blind_by_head is None
            else weights.masked_fill(relation.blind_by_head[..., None], 0.0)
        )

    def cross(self, x: Tensor, context: Projected, relation: Relation) -> Tensor:
        """Queries of x (B, T, C) over projected keys and values (B, H, N, D) -> (B, T, C)."""
        keys, values = context
        return self.attend(self.ask(x), keys, values, relation, None)

    def step(self, x: Tensor, cache: LayerCache, slot: int, relation: Relation) -> Tensor:
        """Write the token x (B, 1, C) into the cache, then attend over the cache -> (B, 1, C)."""
        q, *own = self.split(self.qkv(x))
        cache.write(slot, *self.heard(tuple(own), relation.query.position))
        return self.attend(q, cache.keys, cache.values, relation, cache.table)

    def cache(self, memory: Projected, index: Index, tables: Tables) -> LayerCache:
        """Keep the keys and values of memory, (B, H, S, D), for many steps."""
        k, v = self.heard(memory, index.position)
        table = self.position.table(tables.distances, tables.shared)
        return LayerCache(k.contiguous(), v.contiguous(), table)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, table: Tensor | None) -> Tensor:
        """q (B, H, Tq, D) over k and v (B, H, Tk, D) -> (B, Tq, C). Who sees nothing gets 0."""
        bias = self.position.bias(q, k, relation, table)
        q = self.position.query(q, relation.query.position)
        mixed = self.position.average(self.kernel, q, k, v, bias, relation, table, self._dropout)
        if len(relation.rules) > 1 and relation.blind_by_head is not None:
            mixed = mixed.masked_fill(relation.blind_by_head[..., None], 0.0)
        return self._joined(mixed, relation)

    def _in_parts(self, q: Tensor, k: Tensor, v: Tensor, shares: Sequence[Share]) -> Tensor:
        """What q (B, H, Tq, D) gets of k and v (B, H, Tk, D), group by group: (B, H, Tq, D)."""
        rows = [as_rows(x) for x in (q, k, v)]
        parts = [[self._part(rows, gathered, share.heads) for gathered in share.parts] for share in shares]
        return put_back(shares, parts, like=q)

    def _part(self, rows: Sequence[Tensor], relation: Gathered, heads: slice | list[int]) -> Tensor:
        """What N groups of G queries get in some of the heads, (N, heads, G, D).

        A position that scores pairs is asked for all heads; without one, no more than needed is gathered.
        """
        query, key = relation.part.query, relation.part.key
        wanted = slice(None) if self.pairwise else heads
        q, k = pick(rows[0][:, wanted], query), pick(rows[1][:, wanted], key)
        v, table, bias = pick(rows[2][:, heads], key), None, None
        if self.pairwise:
            table = self.position.table(relation.distances, relation.table)
            bias = self.position.bias(q, k, relation, table)
        q = self.position.query(q, relation.query.position)
        if self.pairwise:
            q, k, bias = q[:, heads], k[:, heads], bias if bias is None else bias[:, heads]
        mixed = self.position.average(self.kernel, q, k, v, bias, relation, table, self._dropout)
        blind = relation.blind_by_head
        return mixed if blind is None else mixed.masked_fill(blind[..., None], 0.0)

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
            q, *own = self.split(self.qkv(x))
        else:
            q, own = self.ask(relation.queries(x)), list(self.project(x))
        if memory is not None:
            own = [torch.cat(pair, dim=2) for pair in zip(memory, own, strict=True)]
        return q, *self.heard(tuple(own), relation.key.position)

    def heard(self, projected: Projected, position: Tensor) -> tuple[Tensor, Tensor]:
        """The keys as they meet queries, and the values, of tokens that stand at ``position`` (B, S)."""
        k, v = projected
        return self.position.key(k, position), v

    def ask(self, x: Tensor) -> Tensor:
        """Queries of x (B, T, C), (B, H, T, D)."""
        width = self.width
        (q,) = self.split(F.linear(x, self.qkv.weight[:width], self.qkv.bias[:width]))
        return q

    def project(self, x: Tensor, linear: Linear = F.linear) -> Projected:
        """Keys and values of x (B, T, C), each (B, H, T, D).

        Args:
            x: what is looked at.
            linear: ``linear(x, weight, bias)``; a layer whose norm is not yet applied to x brings its own.
        """
        width = self.width
        return self.split(linear(x, self.qkv.weight[width:], self.qkv.bias[width:]))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, n C) -> n tensors (B, H, T, D)."""
        parts = x.split(self.width, dim=-1)
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
