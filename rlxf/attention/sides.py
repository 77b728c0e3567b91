"""Attention in which global tokens have projections of their own."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention import Attention, LayerCache, Projected
from rlxf.attention.index import Index
from rlxf.attention.kernels.base import Kernel, LayerMemory, Linear
from rlxf.attention.kernels.lsh import LSH
from rlxf.attention.linear import orthogonal_linear
from rlxf.attention.memorizing import MemorizingAttention
from rlxf.attention.memory.knn import KNN
from rlxf.attention.patterns.base import UNLIMITED, GlobalTokens
from rlxf.attention.patterns.etc import ExtraTokens
from rlxf.attention.positions.base import Position
from rlxf.attention.relation import Relation, Tables
from rlxf.attention.shared import SharedAttention

if TYPE_CHECKING:
    from rlxf.attention.spec import TransformerSpec


def self_attention(spec: "TransformerSpec") -> "Attention | SidedAttention":
    """The attention of a layer among its own tokens, with the sides that its pattern has."""
    pattern, sizes = spec.pattern, (spec.width, spec.heads)
    given = (*sizes, spec.position, spec.kernel, spec.dropout)
    if isinstance(pattern, ExtraTokens):
        count = pattern.global_tokens
        return SidedAttention(count, SideOfPairs(count, *given), SideOfPairs(count, *given), nn.Identity())
    if isinstance(pattern, GlobalTokens):
        out = orthogonal_linear(spec.width, spec.width)
        return SidedAttention(pattern.global_tokens, SideOfQueries(*given), SideOfQueries(*given), out)
    if isinstance(spec.memory, KNN):
        return MemorizingAttention(*given, spec.memory.top, spec.memory.index)
    return (SharedAttention if isinstance(spec.kernel, LSH) else Attention)(*given)


class SideOfQueries(Attention):
    """One of two sides, with projections of its own for q, k and v; the output is for both (Longformer)."""

    def __init__(self, width: int, heads: int, position: Position | None, kernel: Kernel, dropout: float):
        super().__init__(width, heads, position, kernel, dropout)
        self.out = nn.Identity()  # what the heads found, side by side


class SideOfPairs(Attention):
    """One of two sides, with an output of its own, and keys and values for tokens of either side (ETC).

    qkv (5 C, C) holds q, k and v of tokens that are not global, k and v of those that are.
    """

    def __init__(
        self,
        global_tokens: int,
        width: int,
        heads: int,
        position: Position | None,
        kernel: Kernel,
        dropout: float,
    ):
        super().__init__(width, heads, position, kernel, dropout)
        self.qkv = orthogonal_linear(width, width, matrices=5)
        self.global_tokens = global_tokens

    def heard(self, projected: Projected, position: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention`."""
        is_global = (position < self.global_tokens)[:, None, :, None]
        k, v, global_k, global_v, *marks = projected
        k, v = torch.where(is_global, global_k, k), torch.where(is_global, global_v, v)
        return super().heard((k, v, *marks), position)


class SidedAttention(nn.Module):
    """Global tokens ask one attention, the others another; all are seen by both. Called like `Attention`.

    Args:
        global_tokens: number of global tokens, the first ones.
        others: attention of the tokens that are not global.
        globals_: attention of the global ones.
        out: what both share at the end.
    """

    def __init__(self, global_tokens: int, others: Attention, globals_: Attention, out: nn.Module):
        super().__init__()
        self.global_tokens = global_tokens
        self.others = others
        self.globals = globals_
        self.out = out

    def forward(self, x: Tensor, memory: Projected | None, relation: Relation) -> Tensor:
        """See `Attention`."""
        (ours, theirs), (among, wide) = _halves(memory), relation.sides
        return self._chosen(self.others(x, ours, among), self.globals(x, theirs, wide), relation)

    def weights(self, x: Tensor, memory: Projected | None, relation: Relation) -> Tensor:
        """See `Attention`."""
        (ours, theirs), (among, wide) = _halves(memory), relation.sides
        of_others, of_globals = self.others.weights(x, ours, among), self.globals.weights(x, theirs, wide)
        return torch.where(self._is_global(relation)[:, None], of_globals, of_others)

    def step(self, x: Tensor, cache: LayerCache | LayerMemory, slot: int, relation: Relation) -> Tensor:
        """See `Attention`; the cache is that of `cache`."""
        (ours, theirs), (among, wide) = self._rings(cache), relation.sides
        y = self.others.step(x, ours, slot, among)
        return self._chosen(y, self.globals.step(x, theirs, slot, wide), relation)

    def write(self, x: Tensor, cache: LayerCache | LayerMemory, slot: int, relation: Relation) -> None:
        """See `Attention`."""
        (ours, theirs), (among, wide) = self._rings(cache), relation.sides
        self.others.write(x, ours, slot, among)
        self.globals.write(x, theirs, slot, wide)

    @staticmethod
    def _rings(cache: LayerCache | LayerMemory) -> tuple[LayerCache, LayerCache]:
        """Views of what `cache` made: the ring of either side."""
        assert isinstance(cache, LayerCache)
        keys, values = cache.keys.chunk(2, dim=1), cache.values.chunk(2, dim=1)
        tables = (None, None) if cache.table is None else cache.table.unbind(0)
        ours, theirs = (LayerCache(*half) for half in zip(keys, values, tables, strict=True))
        return ours, theirs

    def cache(self, memory: Projected, index: Index, tables: Tables) -> LayerCache:
        """See `Attention`: heads of the globals' side behind those of the other, (B, 2 H, S, D)."""
        ours, theirs = _halves(memory)
        assert ours is not None
        assert theirs is not None
        one, other = self.others.cache(ours, index, tables), self.globals.cache(theirs, index, tables)
        keys, values = torch.cat([one.keys, other.keys], dim=1), torch.cat([one.values, other.values], dim=1)
        if one.table is None or other.table is None:
            return LayerCache(keys, values, None)
        return LayerCache(keys, values, torch.stack([one.table, other.table]))

    @property
    def reach(self) -> int:
        """See `Attention`. Global tokens are seen from everywhere."""
        return UNLIMITED

    def project(self, x: Tensor, linear: Linear = F.linear) -> Projected:
        """See `Attention`: what one side hears, then what the other does."""
        return *self.others.project(x, linear), *self.globals.project(x, linear)

    def _chosen(self, of_others: Tensor, of_globals: Tensor, relation: Relation) -> Tensor:
        """What each token asked for, (B, T, C). Who sees nothing gets 0."""
        y: Tensor = self.out(torch.where(self._is_global(relation), of_globals, of_others))
        among, wide = relation.sides
        if among.blind is None or wide.blind is None:
            return y
        return y.masked_fill((among.blind & wide.blind)[..., None], 0.0)

    def _is_global(self, relation: Relation) -> Tensor:
        """(B, T, 1) bool."""
        return (relation.query.position < self.global_tokens)[..., None]


def _halves(projected: Projected | None) -> tuple[Projected | None, Projected | None]:
    """What either side hears, of what `SidedAttention.project` gave."""
    if projected is None:
        return None, None
    half = len(projected) // 2
    return projected[:half], projected[half:]
