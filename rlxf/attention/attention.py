"""Multi-head attention: projections, position encoding, attention kernel and attention mask."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import (
    PLAIN,
    AttentionArguments,
    OutputGate,
    build_qk_norms,
    repeat_heads,
)
from rlxf.attention.kernels.base import (
    AttentionKernel,
    LinearFn,
    RecurrentAttentionKernel,
    RecurrentKernelState,
)
from rlxf.attention.linear import (
    Linear,
    bound,
    fused_step,
    is_patched,
    mixed_linear,
    orthogonal_linear,
    stacked_orthogonal,
)
from rlxf.attention.positions.base import LayerPosition
from rlxf.attention.relative import DistanceTables
from rlxf.attention.sparse.attention import sparse_average
from rlxf.attention.token_index import TokenIndex, write_slots

Projected = tuple[Tensor, ...]
"""Keys and values, (B, K, S, D) each, and extra key features (B, H, S, F) if the kernel uses them.

K is the number of key heads: H unless heads share keys (`AttentionOptions`).
"""


@dataclass(frozen=True, eq=False)
class LayerCache:
    """KV cache of one layer: a ring buffer of S slots, and the layer's distance table.

    Args:
        keys: (B, K, S, D + F) of K key heads, with the kernel's F extra features.
        values: (B, K, S, D).
        table: distance table of the layer's position encoding, or None.
    """

    keys: Tensor
    values: Tensor
    table: Tensor | None

    @property
    def layout(self) -> str:
        """Number of key heads and of their features, to compare the layouts of two caches."""
        return f"keys of {self.keys.shape[1]} heads and {self.keys.shape[3]} features"

    def write(self, slot: int | Tensor, k: Tensor, v: Tensor) -> None:
        """Write k (B, K, n, D + F) and v (B, K, n, D) to n slots from the given one, in place."""
        write_slots(self.keys, 2, slot, k)
        write_slots(self.values, 2, slot, v)

    def write_rows(self, rows: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k (R, K, 1, D + F) and v (R, K, 1, D) to one slot in each of R rows, in place."""
        self.keys[rows, :, slots] = k[:, :, 0]
        self.values[rows, :, slots] = v[:, :, 0]

    def rows(self, rows: Tensor) -> Self:
        """Return a copy of the selected rows (N,) int64 of the batch."""
        return replace(self, keys=self.keys.index_select(0, rows), values=self.values.index_select(0, rows))

    def copy(self) -> Self:
        """Return a copy with its own keys and values; other fields are shared."""
        return replace(self, keys=self.keys.clone(), values=self.values.clone())


@dataclass(frozen=True, eq=False, slots=True)
class StepKeys:
    """Keys that one query per row attends to, in S slots, for all layers of a `FusedStep`.

    Args:
        slot: slot of the query's own token.
        columns: column of each slot in the distance table, (B, 1, S) int64; arbitrary where masked.
        mask: 0 where the query may attend to the slot, -inf elsewhere, (B, 1, S).
        none_visible: (B, 1) bool, True for a query without visible slots.
    """

    slot: int
    columns: Tensor
    mask: Tensor
    none_visible: Tensor


LayerStep = Callable[[Tensor, LayerCache, StepKeys], Tensor]
"""Function of tokens (B, C), the cache of a layer, which it updates, and the keys: outputs (B, C)."""

PassCache = LayerCache | RecurrentKernelState
"""Cache of one pass: a ring buffer, or the state of a recurrent kernel."""


class Attention(nn.Module):
    """``out(kernel(q, k, v))`` with H heads of D = C / H features.

    Keys and values are projected, normalized and cached with K heads, and repeated for the H heads of queries
    where a kernel reads them.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2. The projections of q, k
    and v are each initialized orthogonally.
    """

    def __init__(self, arguments: AttentionArguments):
        super().__init__()
        width = arguments.width
        heads = arguments.heads
        options = arguments.options
        self.width = width
        self.heads = heads
        self.size = width // heads
        self.kv_heads = options.kv_heads or heads
        self.qkv = self.build_projection(key_matrices=2)
        self.out: nn.Module = orthogonal_linear(width, width)
        self.position = _build_position(arguments)
        self.kernel: AttentionKernel = arguments.kernel.build(width, heads)
        self.kernel.dropout = arguments.dropout
        self.options = options
        self.query_norm, self.key_norm = build_qk_norms(options.qk_norm, self.size, heads, self.kv_heads)
        gate = options.attention_gate
        self.output_gate = None if gate is None else OutputGate(gate, width, heads)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            TypeError: if the projection ``qkv`` is replaced by another module, e.g. by an adapter. Its weight
                is read in parts, so the module would be called for some tokens only.
        """
        if name == "qkv" and type(value) is not Linear:
            raise TypeError(
                f"qkv cannot be replaced by a {type(value).__name__}: keys of the memory are computed from a "
                f"part of its weight; adapt out and feed_forward, or change the weight itself"
            )
        super().__setattr__(name, value)

    def build_projection(self, key_matrices: int) -> Linear:
        """Build the projection of queries and of ``key_matrices`` matrices of keys or values."""
        rows = self.kv_heads * self.size
        linear = Linear(self.width, self.width + key_matrices * rows)
        queries = stacked_orthogonal(1, self.width, self.width)
        keys = stacked_orthogonal(key_matrices, rows, self.width)
        linear.weight = nn.Parameter(torch.cat([queries, keys]).detach())
        nn.init.zeros_(linear.bias)
        return linear

    def forward(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        """Attend from x (B, T, C) over projected memory (B, K, M, D) and x -> (B, Tq, C)."""
        q, k, v = self.project_qkv(x, memory, mask)
        return self._merge_heads(self.segment_average(q, k, v, mask), mask.queries(x), mask)

    def segment_average(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Compute `average` for a segment, block-sparse where that is faster."""
        if not self.kernel.allows_gathering(mask) or mask.sparse_plan is None:
            return self.average(q, k, v, mask, self.position.pass_table(mask))
        k, v = self.repeat_keys(k, v)
        q, k = self.kernel.transform_in_context(q, k, mask)
        return sparse_average(self.kernel, self.position, (q, k, v), self.size, mask)

    def weights(self, x: Tensor, memory: Projected | None, mask: AttentionMask) -> Tensor:
        """Return the attention weights of `forward`, (B, H, T, M + T); row i belongs to query i."""
        q, k, v = self.project_qkv(x, memory, mask)
        q, k, _, bias, _ = self._kernel_inputs(q, k, v, mask, self.position.pass_table(mask))
        return mask.zero_masked_rows(self.kernel.inspect_weights(q, k, bias, mask))

    def cross(self, x: Tensor, context: Projected, mask: AttentionMask) -> Tensor:
        """Attend from x (B, T, C) over projected keys and values (B, K, N, D) -> (B, T, C)."""
        keys, values = self.prepare_keys(context, mask.key.position)
        return self._merge_heads(self.average(self.project_queries(x), keys, values, mask, None), x, mask)

    def step(self, x: Tensor, cache: PassCache, slot: int, mask: AttentionMask) -> Tensor:
        """Write the token x (B, 1, C) into the cache, then attend over the cache -> (B, 1, C)."""
        q, projected = self._project_jointly(x)
        k, v = self.prepare_keys(projected, mask.query.position)
        if isinstance(cache, RecurrentKernelState):
            return self._merge_heads(self._recurrent_step(q, k, v, cache, mask), x, mask)
        cache.write(slot, k, v)
        average = self.position.value_average(self.kernel, cache.table)
        y = average(*self._kernel_inputs(q, cache.keys, cache.values, mask, cache.table))
        return self._merge_heads(self._zero_masked_heads(y, mask), x, mask)

    def fused_step(self) -> LayerStep | None:
        """Return `step` for a `FusedStep`; None if the position, the kernel or an option has no such form."""
        encode, average = fused_step(self.position), fused_step(self.kernel)
        if self.options != PLAIN or encode is None or average is None:
            return None
        qkv = bound(self.qkv)
        out = bound(self.out)
        heads = (3, self.heads, self.size)

        def step(x: Tensor, cache: LayerCache, keys: StepKeys) -> Tensor:
            q, k, v = qkv(x).unflatten(-1, heads).unbind(1)
            cache.write(keys.slot, k.unsqueeze(2), v.unsqueeze(2))
            q, bias = encode(q, keys.columns, cache.table)
            y = average(q, cache.keys, cache.values, bias + keys.mask)
            return out(y).masked_fill(keys.none_visible, 0.0)

        return step

    def write(self, x: Tensor, cache: PassCache, slot: int, mask: AttentionMask) -> None:
        """Write the token x (B, 1, C) into the cache without computing its output."""
        if isinstance(cache, RecurrentKernelState):
            self.step(x, cache, slot, mask)
        else:
            cache.write(slot, *self.prepare_keys(self.project(x), mask.query.position))

    def _recurrent_step(
        self, q: Tensor, k: Tensor, v: Tensor, state: RecurrentKernelState, mask: AttentionMask
    ) -> Tensor:
        """Compute the average of `step` with a recurrent kernel, and update its state."""
        assert isinstance(self.kernel, RecurrentAttentionKernel)
        k, v = self.repeat_keys(k, v)
        q, _ = self.position.encode(q, k, self.size, mask, None)
        return self.kernel.step(q, k, v, mask.query, state)

    def recurrent_state(self, memory: Projected, index: TokenIndex) -> RecurrentKernelState:
        """Compute the state of a recurrent kernel from keys and values of memory, (B, K, S, D)."""
        assert isinstance(self.kernel, RecurrentAttentionKernel)
        return self.kernel.prefill(*self.repeat_keys(*self.prepare_keys(memory, index.position)), index)

    def cache(self, memory: Projected, index: TokenIndex, tables: DistanceTables) -> LayerCache:
        """Create the KV cache from keys and values of memory, (B, K, S, D)."""
        k, v = self.prepare_keys(memory, index.position)
        table = self.position.table(tables.distances, tables.shared)
        return LayerCache(k.contiguous(), v.contiguous(), table)

    @property
    def max_distance(self) -> int:
        """Largest distance, in tokens, at which a key can have a nonzero weight."""
        return self.kernel.max_distance

    def repeat_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Repeat keys and values (B, K, S, ...) for the heads of queries: (B, H, S, ...)."""
        return repeat_heads(k, self.heads), repeat_heads(v, self.heads)

    def average(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Compute the output of each head: q (B, H, Tq, D), k and v (B, K, Tk, D) -> (B, H, Tq, D)."""
        average = self.position.value_average(self.kernel, table)
        return self._zero_masked_heads(average(*self._kernel_inputs(q, k, v, mask, table)), mask)

    def _kernel_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, table: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, AttentionMask]:
        """Return the arguments of `AttentionKernel.forward`."""
        k, v = self.repeat_keys(k, v)
        q, k = self.kernel.transform_in_context(q, k, mask)
        q, bias = self.position.encode(q, k, self.size, mask, table)
        return q, k, v, bias, mask

    def _zero_masked_heads(self, y: Tensor, mask: AttentionMask) -> Tensor:
        """Set outputs y (B, H, Tq, D) of heads without visible keys to 0, if patterns differ by head."""
        return mask.zero_masked_rows(y) if len(mask.head_patterns) > 1 else y

    def _merge_heads(self, y: Tensor, x: Tensor, mask: AttentionMask) -> Tensor:
        """Gate and project outputs of heads (B, H, Tq, D) -> (B, Tq, C); 0 for fully masked queries.

        Args:
            y: outputs of the heads.
            x: tokens of the queries, (B, Tq, C).
            mask: attention mask.
        """
        y = y if self.output_gate is None else self.output_gate(x, y)
        merged: Tensor = self.out(y.transpose(1, 2).flatten(2))
        masked = mask.fully_masked
        return merged if masked is None else merged.masked_fill(masked[..., None], 0.0)

    def project_qkv(
        self, x: Tensor, memory: Projected | None, mask: AttentionMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, H, Tq, D) of x (B, T, C), and k and v (B, K, M + T, D) of memory and x."""
        if mask.query_slice is None:
            q, projected = self._project_jointly(x)
        else:
            q, projected = self.project_queries(mask.queries(x)), self.project(x)
        if memory is not None:
            projected = tuple(torch.cat(pair, dim=2) for pair in zip(memory, projected, strict=True))
        return q, *self.prepare_keys(projected, mask.key.position)

    def _project_jointly(self, x: Tensor) -> tuple[Tensor, Projected]:
        """Compute queries, keys and values of the same tokens in one matrix product."""
        q, *projected = self.split(self.qkv(x), self.width)
        return self._with_query_extras(self.query_norm(q), x), (*projected, *self._key_extras(x))

    def prepare_keys(self, projected: Projected, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return position-encoded keys with extra features, and values, of tokens at ``position`` (B, S)."""
        k, v, *extras = projected
        k = self.as_key(k)
        content_extras = self.kernel.projected_key_extras(k)
        k = self.position.key(k, position)
        return _append_features(k, *extras, content_extras), v

    def as_key(self, k: Tensor) -> Tensor:
        """Transform projected keys (B, K, S, D) before the position encoding: by default normalize them."""
        normalized: Tensor = self.key_norm(k)
        return normalized

    def project_queries(self, x: Tensor) -> Tensor:
        """Project queries with extra features: x (B, T, C) -> (B, H, T, D + E)."""
        (q,) = self.split(self.project_part(x, slice(self.width)), self.width)
        return self._with_query_extras(self.query_norm(q), x)

    def project(self, x: Tensor, linear: LinearFn = mixed_linear) -> Projected:
        """Project keys, values and extra key features of x (B, T, C).

        Args:
            x: tokens.
            linear: ``linear(x, weight, bias)``; a layer passes its own to fuse its norm with the projection
                if `can_fuse_norm`.
        """
        projected = self.split(self.project_part(x, slice(self.width, None), linear))
        return *projected, *self._key_extras(x, linear)

    def project_part(self, x: Tensor, rows: slice, linear: LinearFn = mixed_linear) -> Tensor:
        """Compute the features ``rows`` of ``qkv`` for tokens x (B, T, C).

        All features are computed if the module `is_patched`, since its calls may differ from its weights.
        """
        if is_patched(self.qkv):
            return self.qkv(x)[..., rows]
        return linear(x, self.qkv.weight[rows], self.qkv.bias[rows])

    @property
    def can_fuse_norm(self) -> bool:
        """True if `project` reads the weights of ``qkv``, so that a norm can be fused with it."""
        return not is_patched(self.qkv)

    def _with_query_extras(self, q: Tensor, x: Tensor) -> Tensor:
        return _append_features(q, self.kernel.query_extras(x), self.kernel.projected_query_extras(q))

    def _key_extras(self, x: Tensor, linear: LinearFn = F.linear) -> Projected:
        extras = self.kernel.key_extras(x, linear)
        return () if extras is None else (extras,)

    def split(self, x: Tensor, query_width: int = 0) -> tuple[Tensor, ...]:
        """Split projections into heads.

        Args:
            x: features of queries, then keys and values, (B, T, query_width + n K D).
            query_width: features of queries, H D or 0.

        Returns:
            Queries (B, H, T, D), if any, and n tensors (B, K, T, D).
        """
        rows = self.kv_heads * self.size
        sizes = [rows] * ((x.shape[-1] - query_width) // rows)
        parts = x.split([query_width, *sizes] if query_width else sizes, dim=-1)
        return tuple(part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)


def _build_position(arguments: AttentionArguments) -> LayerPosition:
    if arguments.position is None:
        return LayerPosition()
    position: LayerPosition = arguments.position.build(arguments.width, arguments.heads)
    return position


def _append_features(x: Tensor, *extras: Tensor | None) -> Tensor:
    """Append extra features (B, H, T, E), where present, to the features of x (B, H, T, D)."""
    present = [extra for extra in extras if extra is not None]
    return torch.cat([x, *present], dim=-1) if present else x
