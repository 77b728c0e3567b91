"""Attention whose global and local queries have separate projections (Longformer, ETC, BigBird-ETC)."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rlxf.attention.attention import Attention, LayerCache, Projected
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments
from rlxf.attention.kernels.base import LinearFn, RecurrentKernelState
from rlxf.attention.linear import mixed_linear, orthogonal_linear
from rlxf.attention.patterns.base import (
    UNLIMITED,
)
from rlxf.attention.relative import DistanceTables
from rlxf.attention.token_index import TokenIndex

GlobalPositions = int | tuple[int, ...]
"""Global tokens of an episode: a number, for the first positions, or the positions in ascending order."""


def is_global(position: Tensor, tokens: GlobalPositions) -> Tensor:
    """Return whether positions (...) int64 are those of global tokens: (...) bool."""
    if isinstance(tokens, int):
        return position < tokens
    return torch.isin(position, torch.tensor(tokens, device=position.device))


def number_of_kind(position: Tensor, tokens: GlobalPositions) -> Tensor:
    """Return the number of each token, from 0, among the global tokens or among the others of its episode.

    Args:
        position: positions, (...) int64.
        tokens: global tokens.
    """
    if isinstance(tokens, int):
        return torch.where(position < tokens, position, position - tokens)
    before = torch.searchsorted(torch.tensor(tokens, device=position.device), position.contiguous())
    return torch.where(is_global(position, tokens), before, position - before)


class GlobalAttention(nn.Module):
    """Two attention modules over the same tokens: one for local queries, one for global queries.

    It has the interface of `Attention`.

    Args:
        global_tokens: number of global tokens, which have the first positions, or their positions.
        others: attention of local queries.
        globals_: attention of global queries.
        out: shared output projection.
    """

    def __init__(
        self, global_tokens: GlobalPositions, others: Attention, globals_: Attention, out: nn.Module
    ):
        super().__init__()
        self.global_tokens = global_tokens
        self.others = others
        self.globals = globals_
        self.out = out

    @property
    def _parts(self) -> tuple[Attention, Attention]:
        return self.others, self.globals

    def forward(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        parts = zip(self._parts, _halves(memory), mask.query_masks, strict=True)
        return self._select((part(x, projected, rule) for part, projected, rule in parts), mask)

    def weights(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        parts = zip(self._parts, _halves(memory), mask.query_masks, strict=True)
        local, of_globals = (part.weights(x, projected, rule) for part, projected, rule in parts)
        return torch.where(self._is_global(mask)[:, None], of_globals, local)

    def step(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, mask: AttentionMask
    ) -> Tensor:
        """See `Attention`; the cache is created by `cache`."""
        parts = zip(self._parts, _split_cache(cache), mask.query_masks, strict=True)
        return self._select((part.step(x, ring, slot, rule) for part, ring, rule in parts), mask)

    def write(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, mask: AttentionMask
    ) -> None:
        for part, ring, rule in zip(self._parts, _split_cache(cache), mask.query_masks, strict=True):
            part.write(x, ring, slot, rule)

    def cache(self, memory: Projected, index: TokenIndex, tables: DistanceTables) -> LayerCache:
        """Create a joint cache (B, 2 K, S, D): heads of local queries, then heads of global queries."""
        half = len(memory) // 2
        one = self.others.cache(memory[:half], index, tables)
        other = self.globals.cache(memory[half:], index, tables)
        keys, values = torch.cat([one.keys, other.keys], dim=1), torch.cat([one.values, other.values], dim=1)
        if one.table is None or other.table is None:
            return LayerCache(keys, values, None)
        return LayerCache(keys, values, torch.stack([one.table, other.table]))

    @property
    def max_distance(self) -> int:
        """Unlimited: every token attends to global tokens at any distance."""
        return UNLIMITED

    def project(self, x: Tensor, linear: LinearFn = mixed_linear) -> Projected:
        """Project keys and values for local queries, then for global queries."""
        return *self.others.project(x, linear), *self.globals.project(x, linear)

    @property
    def can_fuse_norm(self) -> bool:
        """True if both projections can be fused with a norm."""
        return all(part.can_fuse_norm for part in self._parts)

    def _select(self, outputs: Iterable[Tensor], mask: AttentionMask) -> Tensor:
        """Select the output of each query by its kind, (B, T, C); 0 for fully masked queries."""
        local, of_globals = outputs
        y: Tensor = self.out(torch.where(self._is_global(mask), of_globals, local))
        local_masked, globals_masked = (rule.fully_masked for rule in mask.query_masks)
        if local_masked is None or globals_masked is None:
            return y
        return y.masked_fill((local_masked & globals_masked)[..., None], 0.0)

    def _is_global(self, mask: AttentionMask) -> Tensor:
        """Return which queries are global tokens, (B, T, 1) bool."""
        return is_global(mask.query.position, self.global_tokens)[..., None]


def _halves(projected: Projected | None) -> tuple[Projected | None, Projected | None]:
    """Split the result of `GlobalAttention.project` into the parts of local and of global queries."""
    if projected is None:
        return None, None
    half = len(projected) // 2
    return projected[:half], projected[half:]


def _split_cache(cache: LayerCache | RecurrentKernelState) -> list[LayerCache]:
    """Return views of a joint cache: the part of local queries and the part of global queries."""
    assert isinstance(cache, LayerCache)
    keys, values = cache.keys.chunk(2, dim=1), cache.values.chunk(2, dim=1)
    tables = (None, None) if cache.table is None else cache.table.unbind(0)
    return [LayerCache(*half) for half in zip(keys, values, tables, strict=True)]


def build_longformer_attention(
    global_tokens: GlobalPositions, arguments: AttentionArguments
) -> GlobalAttention:
    """Build attention with separate q, k and v projections and one output projection (Longformer)."""
    out = orthogonal_linear(arguments.width, arguments.width)
    local, of_globals = (Attention(arguments) for _ in range(2))
    local.out = of_globals.out = nn.Identity()  # outputs of the heads, concatenated
    return GlobalAttention(global_tokens, local, of_globals, out)


class ETCAttention(Attention):
    """Attention with a separate output projection, and separate keys and values of global tokens (ETC).

    ``qkv`` (C + 4 K D, C) projects q, k and v of tokens that are not global, then k and v of global tokens.
    ``global_tokens`` is the number of global tokens, which have the first positions, or their positions.
    """

    global_tokens: GlobalPositions

    def __init__(self, arguments: AttentionArguments):
        super().__init__(arguments)
        self.qkv = self.build_projection(key_matrices=4)

    def prepare_keys(self, projected: Projected, position: Tensor) -> tuple[Tensor, Tensor]:
        of_globals = is_global(position, self.global_tokens)[:, None, :, None]
        k, v, global_k, global_v, *extras = projected
        k, v = torch.where(of_globals, global_k, k), torch.where(of_globals, global_v, v)
        return super().prepare_keys((k, v, *extras), position)


def build_etc_attention(global_tokens: GlobalPositions, arguments: AttentionArguments) -> GlobalAttention:
    """Build attention of two `ETCAttention` modules."""
    local, of_globals = (ETCAttention(arguments) for _ in range(2))
    local.global_tokens = of_globals.global_tokens = global_tokens
    return GlobalAttention(global_tokens, local, of_globals, nn.Identity())
