"""Multi-head attention: projections, position encoding, attention kernel and attention mask."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.base import Kernel, LinearFn, RecurrentAttentionKernel, RecurrentKernelState
from rlxf.attention.modules import orthogonal_linear
from rlxf.attention.positions.base import LayerPosition, Position
from rlxf.attention.relative import DistanceTables
from rlxf.attention.sparse.attention import sparse_average
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

    @property
    def layout(self) -> str:
        """Kind of the cache, heads and features of keys."""
        return f"keys of {self.keys.shape[1]} heads and {self.keys.shape[3]} features"

    def write(self, slot: int, k: Tensor, v: Tensor) -> None:
        """Write k (B, H, n, D + F) and v (B, H, n, D) to n slots from the given one, in place."""
        self.keys[:, :, slot : slot + k.shape[2]] = k
        self.values[:, :, slot : slot + k.shape[2]] = v

    def rows(self, rows: Tensor) -> Self:
        """Return a copy of the selected rows (N,) int64 of the batch."""
        return replace(self, keys=self.keys.index_select(0, rows), values=self.values.index_select(0, rows))

    def copy(self) -> Self:
        """Return a copy with its own keys and values; other fields are shared."""
        return replace(self, keys=self.keys.clone(), values=self.values.clone())


PassCache = LayerCache | RecurrentKernelState
"""Cache of one pass: a ring buffer, or the state of a recurrent kernel."""


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
        self.kernel = kernel.build(width, heads)
        self.kernel.dropout = dropout

    def forward(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        """Attend from x (B, T, C) over projected memory (B, H, M, D) and x -> (B, Tq, C)."""
        q, k, v = self.project_qkv(x, memory, mask)
        return self._merge_heads(self.segment_average(q, k, v, mask), mask)

    def segment_average(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Compute `average` for a segment, block-sparse where that is faster."""
        if not self.kernel.allows_gathering(mask) or mask.sparse_plan is None:
            return self.average(q, k, v, mask, self.position.pass_table(mask))
        q, k = self.kernel.transform_in_context(q, k, mask)
        return sparse_average(self.kernel, self.position, (q, k, v), mask)

    def weights(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        """Return the attention weights of `forward`, (B, H, T, M + T); row i belongs to query i."""
        q, k, v = self.project_qkv(x, memory, mask)
        q, k, _, bias, _ = self._kernel_inputs(q, k, v, mask, self.position.pass_table(mask))
        return mask.zero_masked_rows(self.kernel.inspect_weights(q, k, bias, mask))

    def cross(self, x: Tensor, context: Projected, mask: AttentionMask) -> Tensor:
        """Attend from x (B, T, C) over projected keys and values (B, H, N, D) -> (B, T, C)."""
        keys, values = self.prepare_keys(context, mask.key.position)
        return self.attend(self.project_queries(x), keys, values, mask, None)

    def step(self, x: Tensor, cache: PassCache, slot: int, mask: AttentionMask) -> Tensor:
        """Write the token x (B, 1, C) into the cache, then attend over the cache -> (B, 1, C)."""
        q, projected = self._project_jointly(x)
        k, v = self.prepare_keys(projected, mask.query.position)
        if isinstance(cache, RecurrentKernelState):
            return self._recurrent_step(q, k, v, cache, mask)
        cache.write(slot, k, v)
        average = self.position.value_average(self.kernel, cache.table)
        y = average(*self._kernel_inputs(q, cache.keys, cache.values, mask, cache.table))
        return self._merge_heads(self._zero_masked_heads(y, mask), mask)

    def write(self, x: Tensor, cache: PassCache, slot: int, mask: AttentionMask) -> None:
        """Write the token x (B, 1, C) into the cache without computing its output."""
        if isinstance(cache, RecurrentKernelState):
            self.step(x, cache, slot, mask)
        else:
            cache.write(slot, *self.prepare_keys(self.project(x), mask.query.position))

    def _recurrent_step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: RecurrentKernelState, mask: AttentionMask
    ) -> Tensor:
        """Run `step` with a recurrent kernel, which updates its state instead of a cache slot."""
        assert isinstance(self.kernel, RecurrentAttentionKernel)
        q, _ = self.position.encode(q, k, self.size, mask, None)
        return self._merge_heads(self.kernel.step(q, k, v, mask.query, memory), mask)

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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Attend from q (B, H, Tq, D) over k and v (B, H, Tk, D) -> (B, Tq, C); 0 without visible keys."""
        return self._merge_heads(self.average(q, k, v, mask, table), mask)

    def average(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Compute the output of each head: q (B, H, Tq, D), k and v (B, H, Tk, D) -> (B, H, Tq, D)."""
        average = self.position.value_average(self.kernel, table)
        return self._zero_masked_heads(average(*self._kernel_inputs(q, k, v, mask, table)), mask)

    def _kernel_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, table: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, AttentionMask]:
        """Return the arguments of `AttentionKernel.forward`."""
        q, k = self.kernel.transform_in_context(q, k, mask)
        q, bias = self.position.encode(q, k, self.size, mask, table)
        return q, k, v, bias, mask

    def _zero_masked_heads(self, y: Tensor, mask: AttentionMask) -> Tensor:
        """Set outputs y (B, H, Tq, D) of heads without visible keys to 0, if patterns differ by head."""
        return mask.zero_masked_rows(y) if len(mask.head_patterns) > 1 else y

    def _merge_heads(self, y: Tensor, mask: AttentionMask) -> Tensor:
        """Project the outputs of the heads (B, H, Tq, D) -> (B, Tq, C); 0 for fully masked queries."""
        merged: Tensor = self.out(y.transpose(1, 2).flatten(2))
        masked = mask.fully_masked
        return merged if masked is None else merged.masked_fill(masked[..., None], 0.0)

    def project_qkv(
        self, x: Tensor, memory: Projected | None, mask: AttentionMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, Tq, D) of x (B, T, C), and k and v (B, H, M + T, D) of memory and x."""
        if mask.query_slice is None:
            q, projected = self._project_jointly(x)
        else:
            q, projected = self.project_queries(mask.queries(x)), self.project(x)
        if memory is not None:
            projected = tuple(torch.cat(pair, dim=2) for pair in zip(memory, projected, strict=True))
        return q, *self.prepare_keys(projected, mask.key.position)

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
