"""Multi-head attention: projections, position encoding, attention kernel and attention mask."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask, DistanceTables, GatheredMask, HeadGroup
from rlxf.attention.init import orthogonal_linear
from rlxf.attention.kernels.base import Kernel, LinearFn, RecurrentAttentionKernel, RecurrentKernelState
from rlxf.attention.positions.base import LayerPosition, PairwisePosition, Position
from rlxf.attention.sparse.gather import flatten_tokens, gather_tokens, scatter_outputs
from rlxf.attention.token_index import TokenIndex

Projected = tuple[Tensor, ...]
"""Keys and values, (B, H, S, D) each, and extra key features (B, H, S, F) if the kernel uses them."""


@dataclass(frozen=True, eq=False)
class LayerCache:
    """KV cache of one layer: a ring buffer of S slots, and the layer's distance table.

    Args:
        keys: (B, H, S, D + F), with the kernel's F extra features.
        values: (B, H, S, D).
        table: distance table of the layer's position encoding, or None.
    """

    keys: Tensor
    values: Tensor
    table: Tensor | None

    def write(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Write k (B, H, 1, D + F) and v (B, H, 1, D) to a slot, in place."""
        self.keys[:, :, slot : slot + 1] = k
        self.values[:, :, slot : slot + 1] = v

    def rows(self, rows: Tensor) -> "LayerCache":
        """Return a copy of the selected rows (N,) int64 of the batch."""
        return LayerCache(self.keys.index_select(0, rows), self.values.index_select(0, rows), self.table)

    def copy(self) -> Self:
        """Return a copy with its own keys and values; other fields are shared."""
        return replace(self, keys=self.keys.clone(), values=self.values.clone())


class Attention(nn.Module):
    """``out(kernel(q, k, v))`` with H heads of D = C / H features.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2. The projections of q, k
    and v are each initialized orthogonally.

    Args:
        width: features of a token C.
        heads: number of heads H.
        position: position encoding that enters the scores; None for none.
        kernel: attention kernel, which computes the weighted average of the values.
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
        self.heads_differ = bool(self.kernel.state_dict())  # the kernel has weights per head
        self.dropout = dropout

    def forward(self, x: Tensor, memory: Projected | None, relation: AttentionMask) -> Tensor:
        """Attend from x (B, T, C) over projected memory (B, H, M, D) and x -> (B, Tq, C)."""
        q, k, v = self.project_qkv(x, memory, relation)
        return self._merge_heads(self.segment_average(q, k, v, relation), relation)

    def segment_average(self, q: Tensor, k: Tensor, v: Tensor, relation: AttentionMask) -> Tensor:
        """Compute `average` for a segment, block-sparse where that is faster."""
        shares = self.kernel.head_groups(relation)
        if shares is None:
            return self.average(q, k, v, relation, self._table(relation))
        q, k = self.kernel.before_gathering(q, k, relation)
        return self._block_sparse(q, k, v, shares)

    def weights(self, x: Tensor, memory: Projected | None, relation: AttentionMask) -> Tensor:
        """Return the attention weights of `forward`, (B, H, T, M + T); row i belongs to query i."""
        q, k, _ = self.project_qkv(x, memory, relation)
        q, k = self.kernel.before_gathering(q, k, relation)
        bias, q = self._bias_and_query(q, k, relation, self._table(relation))
        weights = self.kernel.inspect_weights(q, k, bias, relation, self._dropout)
        return (
            weights
            if relation.fully_masked_by_head is None
            else weights.masked_fill(relation.fully_masked_by_head[..., None], 0.0)
        )

    def cross(self, x: Tensor, context: Projected, relation: AttentionMask) -> Tensor:
        """Attend from x (B, T, C) over projected keys and values (B, H, N, D) -> (B, T, C)."""
        keys, values = self.prepare_keys(context, relation.key.position)
        return self.attend(self.project_queries(x), keys, values, relation, None)

    def step(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, relation: AttentionMask
    ) -> Tensor:
        """Write the token x (B, 1, C) into the cache, then attend over the cache -> (B, 1, C)."""
        q, projected = self._project_jointly(x)
        k, v = self.prepare_keys(projected, relation.query.position)
        if isinstance(cache, RecurrentKernelState):
            return self._recurrent_step(q, k, v, cache, relation)
        cache.write(slot, k, v)
        return self.attend(q, cache.keys, cache.values, relation, cache.table)

    def write(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, relation: AttentionMask
    ) -> None:
        """Write the token x (B, 1, C) into the cache without computing its output."""
        if isinstance(cache, RecurrentKernelState):
            self.step(x, cache, slot, relation)
            return
        cache.write(slot, *self.prepare_keys(self.project(x), relation.query.position))

    def _recurrent_step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: RecurrentKernelState, relation: AttentionMask
    ) -> Tensor:
        """Run `step` with a recurrent kernel, which updates its state instead of a cache slot."""
        assert isinstance(self.kernel, RecurrentAttentionKernel)
        _, q = self._bias_and_query(q, k, relation, None)
        return self._merge_heads(self.kernel.step(q, k, v, relation.query, memory), relation)

    def recurrent_state(self, memory: Projected, index: TokenIndex) -> RecurrentKernelState:
        """Compute the state of a recurrent kernel from keys and values of memory, (B, H, S, D)."""
        assert isinstance(self.kernel, RecurrentAttentionKernel)
        return self.kernel.prefill(*self.prepare_keys(memory, index.position), index)

    def cache(self, memory: Projected, index: TokenIndex, tables: DistanceTables) -> LayerCache:
        """Create the KV cache from keys and values of memory, (B, H, S, D)."""
        k, v = self.prepare_keys(memory, index.position)
        table = self.position.table(tables.distances, tables.shared)
        return LayerCache(k.contiguous(), v.contiguous(), table)

    @property
    def max_distance(self) -> int:
        """Largest distance, in tokens, at which a key can have a nonzero weight."""
        return self.kernel.max_distance

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, relation: AttentionMask, table: Tensor | None
    ) -> Tensor:
        """Attend from q (B, H, Tq, D) over k and v (B, H, Tk, D) -> (B, Tq, C); 0 without visible keys."""
        return self._merge_heads(self.average(q, k, v, relation, table), relation)

    def average(
        self, q: Tensor, k: Tensor, v: Tensor, relation: AttentionMask, table: Tensor | None
    ) -> Tensor:
        """Compute the output of each head: q (B, H, Tq, D), k and v (B, H, Tk, D) -> (B, H, Tq, D)."""
        q, k = self.kernel.before_gathering(q, k, relation)
        bias, q = self._bias_and_query(q, k, relation, table)
        mixed = self.position.average(self.kernel, q, k, v, bias, relation, table, self._dropout)
        if len(relation.rules) > 1 and relation.fully_masked_by_head is not None:
            mixed = mixed.masked_fill(relation.fully_masked_by_head[..., None], 0.0)
        return mixed

    def _block_sparse(self, q: Tensor, k: Tensor, v: Tensor, shares: Sequence[HeadGroup]) -> Tensor:
        """Compute `average` with gathered keys: q (B, H, Tq, D), k and v (B, H, Tk, D) -> (B, H, Tq, D)."""
        rows = [flatten_tokens(x) for x in (q, k, v)]
        parts = [
            [self._attend_groups(rows, gathered, share.heads) for gathered in share.parts] for share in shares
        ]
        return scatter_outputs(shares, parts, like=q[..., : v.shape[-1]])

    def _attend_groups(
        self, rows: Sequence[Tensor], relation: GatheredMask, heads: slice | list[int]
    ) -> Tensor:
        """Compute the outputs of N groups of G queries in the given heads, (N, heads, G, D).

        Pairwise positions and kernels with weights need all heads. Otherwise only these heads are gathered.
        """
        query, key = relation.part.query, relation.part.key
        kernel_heads = slice(None) if self.heads_differ else heads
        scored_heads = slice(None) if self.pairwise else kernel_heads
        q, k = gather_tokens(rows[0][:, scored_heads], query), gather_tokens(rows[1][:, scored_heads], key)
        v, table = gather_tokens(rows[2][:, kernel_heads], key), self._table(relation)
        bias, q = self._bias_and_query(q, k, relation, table)
        if self.pairwise:
            q, k = q[:, kernel_heads], k[:, kernel_heads]
            bias = bias if bias is None else bias[:, kernel_heads]
        mixed = self.position.average(self.kernel, q, k, v, bias, relation, table, self._dropout)
        mixed = mixed[:, heads] if self.heads_differ else mixed
        blind = relation.fully_masked_by_head
        return mixed if blind is None else mixed.masked_fill(blind[..., None], 0.0)

    def _table(self, relation: AttentionMask) -> Tensor | None:
        """Return the distance table of a pairwise position encoding, else None."""
        return self.position.table(relation.distances, relation.table) if self.pairwise else None

    def _bias_and_query(
        self, q: Tensor, k: Tensor, relation: AttentionMask, table: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return the position bias and the position-encoded queries. Extra kernel features stay unchanged."""
        size = self.size
        content = q[..., :size]
        bias = self.position.bias(content, k[..., :size], relation, table)
        encoded = self.position.query(content, relation.query.position)
        return bias, encoded if q.shape[-1] == size else torch.cat([encoded, q[..., size:]], dim=-1)

    def _merge_heads(self, mixed: Tensor, relation: AttentionMask) -> Tensor:
        """Project the outputs of the heads (B, H, Tq, D) -> (B, Tq, C); 0 for fully masked queries."""
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y if relation.fully_masked is None else y.masked_fill(relation.fully_masked[..., None], 0.0)

    @property
    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def project_qkv(
        self, x: Tensor, memory: Projected | None, relation: AttentionMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, Tq, D) of x (B, T, C), and k and v (B, H, M + T, D) of memory and x."""
        if relation.query_slice is None:
            q, projected = self._project_jointly(x)
        else:
            q, projected = self.project_queries(relation.queries(x)), self.project(x)
        if memory is not None:
            projected = tuple(torch.cat(pair, dim=2) for pair in zip(memory, projected, strict=True))
        return q, *self.prepare_keys(projected, relation.key.position)

    def _project_jointly(self, x: Tensor) -> tuple[Tensor, Projected]:
        """Compute queries, keys and values of the same tokens in one matrix product."""
        q, *projected = self.split(self.qkv(x))
        return self._with_query_extras(q, x), (*projected, *self._key_extras(x))

    def prepare_keys(self, projected: Projected, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return position-encoded keys with extra features, and values, of tokens at ``position`` (B, S)."""
        k, v, *extras = projected
        content_extras = self.kernel.projected_key_extras(k)
        k = self.position.key(self.as_key(k), position)
        return _append_features(k, *extras, content_extras), v

    def as_key(self, k: Tensor) -> Tensor:
        """Transform projected keys (B, H, S, D) before the position encoding; the default is the identity."""
        return k

    def project_queries(self, x: Tensor) -> Tensor:
        """Project queries with extra features: x (B, T, C) -> (B, H, T, D + E)."""
        width = self.width
        (q,) = self.split(F.linear(x, self.qkv.weight[:width], self.qkv.bias[:width]))
        return self._with_query_extras(q, x)

    def project(self, x: Tensor, linear: LinearFn = F.linear) -> Projected:
        """Project keys, values and extra key features of x (B, T, C).

        Args:
            x: tokens.
            linear: ``linear(x, weight, bias)``; a layer passes its own to fuse its norm with the projection.
        """
        width = self.width
        projected = self.split(linear(x, self.qkv.weight[width:], self.qkv.bias[width:]))
        return *projected, *self._key_extras(x, linear)

    def _with_query_extras(self, q: Tensor, x: Tensor) -> Tensor:
        return _append_features(q, self.kernel.query_extras(x), self.kernel.projected_query_extras(q))

    def _key_extras(self, x: Tensor, linear: LinearFn = F.linear) -> Projected:
        extras = self.kernel.key_extras(x, linear)
        return () if extras is None else (extras,)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split into heads: (B, T, n C) -> n tensors (B, H, T, D)."""
        parts = x.split(self.width, dim=-1)
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)


def _append_features(x: Tensor, *extras: Tensor | None) -> Tensor:
    """Append extra features (B, H, T, E), where present, to the features of x (B, H, T, D)."""
    present = [extra for extra in extras if extra is not None]
    return torch.cat([x, *present], dim=-1) if present else x
