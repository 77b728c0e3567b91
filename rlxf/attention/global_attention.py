"""Attention with separate projections for global tokens (Longformer, ETC, BigBird-ETC)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention import Attention, LayerCache, Projected
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.init import orthogonal_linear
from rlxf.attention.kernels.base import Kernel, LinearFn, RecurrentKernelState
from rlxf.attention.patterns.base import UNLIMITED
from rlxf.attention.positions.base import Position
from rlxf.attention.relative import DistanceTables
from rlxf.attention.token_index import TokenIndex


class LongformerAttention(Attention):
    """Attention with separate q, k and v projections; the output projection is shared (Longformer)."""

    def __init__(self, width: int, heads: int, position: Position | None, kernel: Kernel, dropout: float):
        super().__init__(width, heads, position, kernel, dropout)
        self.out = nn.Identity()  # outputs of the heads, concatenated


class ETCAttention(Attention):
    """Attention with a separate output projection, and separate keys and values of global tokens (ETC).

    ``qkv`` (5 C, C) projects q, k and v of tokens that are not global, then k and v of global tokens.
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

    def prepare_keys(self, projected: Projected, position: Tensor) -> tuple[Tensor, Tensor]:
        is_global = (position < self.global_tokens)[:, None, :, None]
        k, v, global_k, global_v, *extras = projected
        k, v = torch.where(is_global, global_k, k), torch.where(is_global, global_v, v)
        return super().prepare_keys((k, v, *extras), position)


class GlobalAttention(nn.Module):
    """Two attention modules over the same tokens: one for global queries, one for other queries.

    It has the interface of `Attention`. "Local" below means queries that are not global tokens.

    Args:
        global_tokens: number of global tokens g; they have the positions 0 to g - 1.
        others: attention of local queries.
        globals_: attention of global queries.
        out: shared output projection.
    """

    def __init__(self, global_tokens: int, others: Attention, globals_: Attention, out: nn.Module):
        super().__init__()
        self.global_tokens = global_tokens
        self.others = others
        self.globals = globals_
        self.out = out

    def forward(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        (local_memory, global_memory), (local_mask, global_mask) = _halves(memory), mask.query_masks
        local_output = self.others(x, local_memory, local_mask)
        return self._select(local_output, self.globals(x, global_memory, global_mask), mask)

    def weights(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        (local_memory, global_memory), (local_mask, global_mask) = _halves(memory), mask.query_masks
        local_weights = self.others.weights(x, local_memory, local_mask)
        global_weights = self.globals.weights(x, global_memory, global_mask)
        return torch.where(self._is_global(mask)[:, None], global_weights, local_weights)

    def step(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, mask: AttentionMask
    ) -> Tensor:
        """See `Attention`; the cache is created by `cache`."""
        (local_cache, global_cache), (local_mask, global_mask) = self._split_cache(cache), mask.query_masks
        local_output = self.others.step(x, local_cache, slot, local_mask)
        return self._select(local_output, self.globals.step(x, global_cache, slot, global_mask), mask)

    def write(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, mask: AttentionMask
    ) -> None:
        (local_cache, global_cache), (local_mask, global_mask) = self._split_cache(cache), mask.query_masks
        self.others.write(x, local_cache, slot, local_mask)
        self.globals.write(x, global_cache, slot, global_mask)

    @staticmethod
    def _split_cache(cache: LayerCache | RecurrentKernelState) -> tuple[LayerCache, LayerCache]:
        """Return views of a joint cache: the part of local queries and the part of global queries."""
        assert isinstance(cache, LayerCache)
        keys, values = cache.keys.chunk(2, dim=1), cache.values.chunk(2, dim=1)
        tables = (None, None) if cache.table is None else cache.table.unbind(0)
        local_cache, global_cache = (LayerCache(*half) for half in zip(keys, values, tables, strict=True))
        return local_cache, global_cache

    def cache(self, memory: Projected, index: TokenIndex, tables: DistanceTables) -> LayerCache:
        """Create a joint cache (B, 2 H, S, D): heads of local queries, then heads of global queries."""
        local_memory, global_memory = _halves(memory)
        assert local_memory is not None
        assert global_memory is not None
        one, other = (
            self.others.cache(local_memory, index, tables),
            self.globals.cache(global_memory, index, tables),
        )
        keys, values = torch.cat([one.keys, other.keys], dim=1), torch.cat([one.values, other.values], dim=1)
        if one.table is None or other.table is None:
            return LayerCache(keys, values, None)
        return LayerCache(keys, values, torch.stack([one.table, other.table]))

    @property
    def max_distance(self) -> int:
        """Unlimited: every token attends to global tokens at any distance."""
        return UNLIMITED

    def project(self, x: Tensor, linear: LinearFn = F.linear) -> Projected:
        """Project keys and values for local queries, then for global queries."""
        return *self.others.project(x, linear), *self.globals.project(x, linear)

    def _select(self, local_output: Tensor, global_output: Tensor, mask: AttentionMask) -> Tensor:
        """Select the output of each query by its kind, (B, T, C); 0 for fully masked queries."""
        y: Tensor = self.out(torch.where(self._is_global(mask), global_output, local_output))
        local_mask, global_mask = mask.query_masks
        if local_mask.fully_masked is None or global_mask.fully_masked is None:
            return y
        return y.masked_fill((local_mask.fully_masked & global_mask.fully_masked)[..., None], 0.0)

    def _is_global(self, mask: AttentionMask) -> Tensor:
        """Return which queries are global tokens, (B, T, 1) bool."""
        return (mask.query.position < self.global_tokens)[..., None]


def build_longformer_attention(
    global_tokens: int, width: int, heads: int, position: Position | None, kernel: Kernel, dropout: float
) -> GlobalAttention:
    """Build attention of two `LongformerAttention` modules with one output projection."""
    out = orthogonal_linear(width, width)
    local, of_globals = (LongformerAttention(width, heads, position, kernel, dropout) for _ in range(2))
    return GlobalAttention(global_tokens, local, of_globals, out)


def build_etc_attention(
    global_tokens: int, width: int, heads: int, position: Position | None, kernel: Kernel, dropout: float
) -> GlobalAttention:
    """Build attention of two `ETCAttention` modules."""
    local, of_globals = (
        ETCAttention(global_tokens, width, heads, position, kernel, dropout) for _ in range(2)
    )
    return GlobalAttention(global_tokens, local, of_globals, nn.Identity())


def _halves(projected: Projected | None) -> tuple[Projected | None, Projected | None]:
    """Split the result of `GlobalAttention.project` into the parts of local and of global queries."""
    if projected is None:
        return None, None
    half = len(projected) // 2
    return projected[:half], projected[half:]
