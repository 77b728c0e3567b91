"""Global tokens and the attention between them and the sequence (ETC, Longformer, BigBird-ETC)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention import Attention, LayerCache, Projected
from rlxf.attention.attention_mask import AttentionMask, DistanceTables
from rlxf.attention.init import orthogonal_linear
from rlxf.attention.kernels.base import Kernel, LinearFn, RecurrentKernelState
from rlxf.attention.kernels.lsh import LSH
from rlxf.attention.memory.knn import KNN
from rlxf.attention.memory.knn_attention import KNNAttention
from rlxf.attention.patterns.base import UNLIMITED, GlobalTokens
from rlxf.attention.patterns.etc import ExtraTokens
from rlxf.attention.positions.base import Position
from rlxf.attention.shared_qk import SharedQKAttention
from rlxf.attention.token_index import TokenIndex

if TYPE_CHECKING:
    from rlxf.attention.spec import TransformerSpec


class NoGlobalTokens(nn.Module):
    """No global tokens: the sequence is unchanged."""

    def index(self, index: TokenIndex) -> TokenIndex:
        """Return the index of all tokens, global tokens first."""
        return index

    def forward(self, x: Tensor, index: TokenIndex) -> Tensor:
        """Prepend the global tokens to x (B, T, C); ``index`` (B, E + T) is the index of all tokens."""
        return x


class LearnedGlobalTokens(NoGlobalTokens):
    """Learned embeddings (g, C) at positions 0 to g - 1 of each episode; its own tokens shift by g positions.

    Args:
        count: number of global tokens g per episode.
        width: features of a token C.
    """

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width))

    def index(self, index: TokenIndex) -> TokenIndex:
        """Return the index of all tokens. Rows with fewer episodes than others get empty slots."""
        count, episode = self.weight.shape[0], index.episodes
        position = torch.arange(count, device=episode.device).repeat(episode.shape[1])
        extra = TokenIndex(position.expand(len(episode), -1), episode.repeat_interleave(count, dim=1))
        return extra.concatenate(TokenIndex(index.position + count, index.episode))

    def forward(self, x: Tensor, index: TokenIndex) -> Tensor:
        """See `NoGlobalTokens`."""
        extra = self.weight[index.position[:, : index.shape[1] - x.shape[1]]]
        return torch.cat([extra.to(x.dtype), x], dim=1)


def build_self_attention(spec: "TransformerSpec") -> "Attention | GlobalAttention":
    """Build the self-attention module of a layer that its pattern, memory and kernel require."""
    pattern, sizes = spec.pattern, (spec.width, spec.heads)
    args = (*sizes, spec.position, spec.kernel, spec.dropout)
    if isinstance(pattern, ExtraTokens):
        count = pattern.global_tokens
        return GlobalAttention(count, ETCAttention(count, *args), ETCAttention(count, *args), nn.Identity())
    if isinstance(pattern, GlobalTokens):
        out = orthogonal_linear(spec.width, spec.width)
        return GlobalAttention(
            pattern.global_tokens, LongformerAttention(*args), LongformerAttention(*args), out
        )
    if isinstance(spec.memory, KNN):
        return KNNAttention(*args, spec.memory.top, spec.memory.index)
    return (SharedQKAttention if isinstance(spec.kernel, LSH) else Attention)(*args)


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
        """See `Attention`."""
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

    def forward(self, x: Tensor, memory: Projected | None, relation: AttentionMask) -> Tensor:
        """See `Attention`."""
        (local_memory, global_memory), (local_mask, global_mask) = _halves(memory), relation.sides
        local_output = self.others(x, local_memory, local_mask)
        return self._select(local_output, self.globals(x, global_memory, global_mask), relation)

    def weights(self, x: Tensor, memory: Projected | None, relation: AttentionMask) -> Tensor:
        """See `Attention`."""
        (local_memory, global_memory), (local_mask, global_mask) = _halves(memory), relation.sides
        local_weights = self.others.weights(x, local_memory, local_mask)
        global_weights = self.globals.weights(x, global_memory, global_mask)
        return torch.where(self._is_global(relation)[:, None], global_weights, local_weights)

    def step(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, relation: AttentionMask
    ) -> Tensor:
        """See `Attention`; the cache is created by `cache`."""
        (local_cache, global_cache), (local_mask, global_mask) = self._split_cache(cache), relation.sides
        local_output = self.others.step(x, local_cache, slot, local_mask)
        return self._select(local_output, self.globals.step(x, global_cache, slot, global_mask), relation)

    def write(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, relation: AttentionMask
    ) -> None:
        """See `Attention`."""
        (local_cache, global_cache), (local_mask, global_mask) = self._split_cache(cache), relation.sides
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

    def _select(self, local_output: Tensor, global_output: Tensor, relation: AttentionMask) -> Tensor:
        """Select the output of each query by its kind, (B, T, C); 0 for fully masked queries."""
        y: Tensor = self.out(torch.where(self._is_global(relation), global_output, local_output))
        local_mask, global_mask = relation.sides
        if local_mask.fully_masked is None or global_mask.fully_masked is None:
            return y
        return y.masked_fill((local_mask.fully_masked & global_mask.fully_masked)[..., None], 0.0)

    def _is_global(self, relation: AttentionMask) -> Tensor:
        """Return which queries are global tokens, (B, T, 1) bool."""
        return (relation.query.position < self.global_tokens)[..., None]


def _halves(projected: Projected | None) -> tuple[Projected | None, Projected | None]:
    """Split the result of `GlobalAttention.project` into the parts of local and of global queries."""
    if projected is None:
        return None, None
    half = len(projected) // 2
    return projected[:half], projected[half:]
