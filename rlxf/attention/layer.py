"""Transformer layer: attention and feed-forward sublayers, each with layer norm and residual connection."""

from typing import Any

from torch import Tensor, nn

from rlxf.attention.attention import Attention, LayerCache, Projected
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cross_attention import CrossAttention
from rlxf.attention.dropout import Dropout
from rlxf.attention.feed_forward import FeedForward
from rlxf.attention.kernels.base import RecurrentKernelState
from rlxf.attention.relative import DistanceTables
from rlxf.attention.technique import AttentionFactory, SpecView
from rlxf.attention.token_index import TokenIndex


def build_self_attention(spec: SpecView) -> Any:
    """Build the self-attention module of a layer: an `Attention`, or what a technique requires instead."""
    build: AttentionFactory = Attention
    for technique in (spec.position, spec.kernel, spec.memory, spec.pattern):
        build = build if technique is None else technique.attention_class(build)
    return build(spec.width, spec.heads, spec.position, spec.kernel, spec.dropout)


class Block(nn.Module):
    """One layer of a `Transformer`.

    The order is `attend` for a segment, or `attention.step` for one token; then `cross` in a decoder, `feed`.
    """

    def __init__(self, spec: SpecView):
        super().__init__()
        self.attention_norm, feed_forward_norm = spec.residual.build_norms(spec.norm, spec.width, spec.heads)
        self.attention: Attention = build_self_attention(spec)
        self.cross = CrossAttention(spec) if spec.cross_attention else None
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = FeedForward(
            spec.width, spec.inner_width, spec.activation, spec.feed_forward_chunk
        )
        self.compression = None if spec.memory is None else spec.memory.build(spec.width)
        self.dropout = Dropout(spec.dropout)

    def attend(self, x: Tensor, memory: Tensor | None, mask: AttentionMask) -> Tensor:
        """Apply self-attention of the segment x (B, T, C) over memory (B, M, C) and x -> (B, Tq, C)."""
        norm = self.attention_norm
        return norm.combine(mask.queries(x), self.attention_branch(norm.branch_input(x), memory, mask))

    def attention_branch(self, x: Tensor, memory: Tensor | None, mask: AttentionMask) -> Tensor:
        """Compute the attention branch for normalized x (B, T, C), without the residual connection."""
        y: Tensor = self.dropout(self.attention(x, self._project_memory(memory), mask))
        return y

    def weights(self, x: Tensor, memory: Tensor | None, mask: AttentionMask) -> Tensor:
        """Return attention weights (B, H, T, M + T) of x (B, T, C) over memory (B, M, C) and x."""
        return self.attention.weights(self.attention_norm.normalize(x), self._project_memory(memory), mask)

    def step(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, mask: AttentionMask
    ) -> Tensor:
        """Apply self-attention of one token x (B, 1, C) over the cache, which includes x -> (B, 1, C)."""
        norm = self.attention_norm
        y = self.attention.step(norm.branch_input(x), cache, slot, mask)
        return norm.combine(x, self.dropout(y))

    def write(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, mask: AttentionMask
    ) -> None:
        """Write one token x (B, 1, C) into the cache without computing its output."""
        self.attention.write(self.attention_norm.branch_input(x), cache, slot, mask)

    def feed(self, x: Tensor) -> Tensor:
        """Apply the feed-forward sublayer: x (B, T, C) -> (B, T, C)."""
        norm = self.feed_forward_norm
        return norm.combine(x, self.feed_branch(norm.branch_input(x)))

    def feed_branch(self, x: Tensor) -> Tensor:
        """Compute the feed-forward branch for normalized x (B, T, C), without the residual connection."""
        y: Tensor = self.dropout(self.feed_forward(x))
        return y

    def cache(self, memory: Tensor, index: TokenIndex, tables: DistanceTables) -> LayerCache:
        """Create the KV cache of the memory tokens (B, S, C)."""
        return self.attention.cache(self.project(memory), index, tables)

    def recurrent_state(self, memory: Tensor, index: TokenIndex) -> RecurrentKernelState:
        """Compute the state of a recurrent kernel from the memory tokens (B, S, C)."""
        return self.attention.recurrent_state(self.project(memory), index)

    def prepare_keys(self, x: Tensor, index: TokenIndex) -> tuple[Tensor, Tensor]:
        """Return position-encoded keys and values (B, H, S, D) of tokens x (B, S, C) at an index (B, S)."""
        return self.attention.prepare_keys(self.project(x), index.position)

    def content_query(self, x: Tensor) -> Tensor:
        """Return queries (B, H, T, D) of tokens x (B, T, C), without position encoding."""
        return self.attention.project_queries(self.attention_norm.normalize(x))[..., : self.attention.size]

    def content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, S, D) of tokens x (B, S, C), without position encoding."""
        k, v, *_ = self.project(x)
        return k, v

    def project(self, memory: Tensor) -> Projected:
        """Project keys and values of the memory tokens (B, M, C)."""
        return self.attention.project(memory, self.attention_norm.project)

    def _project_memory(self, memory: Tensor | None) -> Projected | None:
        return None if memory is None else self.project(memory)
