"""Transformer layer: attention and feed-forward sublayers, each with layer norm and residual connection."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlxf.attention.attention import Attention, LayerCache, Projected
from rlxf.attention.attention_mask import AttentionMask, DistanceTables
from rlxf.attention.dropout import Dropout
from rlxf.attention.feed_forward import FeedForward
from rlxf.attention.global_attention import GlobalAttention, build_self_attention
from rlxf.attention.kernels.base import RecurrentKernelState
from rlxf.attention.memory.knn_attention import FarLayerCache, KNNAttention
from rlxf.attention.norm import NORMS, build_sublayer_norms
from rlxf.attention.token_index import TokenIndex

if TYPE_CHECKING:
    from rlxf.attention.spec import TransformerSpec


class CrossAttention(nn.Module):
    """Cross-attention sublayer of a decoder: norm, attention without positions, and residual."""

    def __init__(self, spec: "TransformerSpec"):
        super().__init__()
        self.join = NORMS[spec.norm](spec.width, spec.heads, spec.residual)
        self.attention = Attention(spec.width, spec.heads, None, spec.kernel, spec.dropout)
        self.dropout = Dropout(spec.dropout)

    def project(self, context: Tensor) -> Projected:
        """Project keys and values of the context tokens (B, N, C)."""
        return self.attention.project(context)

    def forward(self, x: Tensor, context: Projected, relation: AttentionMask) -> Tensor:
        """Attend from x (B, T, C) over the projected context (B, H, N, D) -> (B, T, C)."""
        y = self.attention.cross(self.join.branch_input(x), context, relation)
        return self.join.combine(x, self.dropout(y))


class Block(nn.Module):
    """One layer of a `Transformer`.

    The order is `attend` for a segment or `step` for one token, then `cross` in a decoder, then `feed`.
    """

    def __init__(self, spec: "TransformerSpec"):
        super().__init__()
        join_attention, join_feed_forward = build_sublayer_norms(
            spec.norm, spec.width, spec.heads, spec.residual
        )
        self.attention_norm = join_attention
        self.attention = build_self_attention(spec)
        self.cross = CrossAttention(spec) if spec.cross_attention else None
        self.feed_forward_norm = join_feed_forward
        self.feed_forward = FeedForward(
            spec.width, spec.inner_width, spec.activation, spec.feed_forward_chunk
        )
        self.compression = None if spec.memory is None else spec.memory.build(spec.width)
        self.dropout = Dropout(spec.dropout)

    def drop_global_attention(self) -> None:
        """Remove the global attention: in the last layer the outputs of global tokens are unused."""
        assert isinstance(self.attention, GlobalAttention)
        self.attention = self.attention.others

    def attend(self, x: Tensor, memory: Tensor | None, relation: AttentionMask) -> Tensor:
        """Apply self-attention of the segment x (B, T, C) over memory (B, M, C) and x -> (B, Tq, C)."""
        join = self.attention_norm
        return join.combine(
            relation.queries(x), self.attention_branch(join.branch_input(x), memory, relation)
        )

    def attention_branch(self, x: Tensor, memory: Tensor | None, relation: AttentionMask) -> Tensor:
        """Compute the attention branch for normalized x (B, T, C), without the residual connection."""
        y: Tensor = self.dropout(self.attention(x, self.project_memory(memory), relation))
        return y

    def weights(self, x: Tensor, memory: Tensor | None, relation: AttentionMask) -> Tensor:
        """Return attention weights (B, H, T, M + T) of x (B, T, C) over memory (B, M, C) and x."""
        return self.attention.weights(self.attention_norm.normalize(x), self.project_memory(memory), relation)

    def step(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, relation: AttentionMask
    ) -> Tensor:
        """Apply self-attention of one token x (B, 1, C) over the cache, which includes x -> (B, 1, C)."""
        join = self.attention_norm
        y = self.attention.step(join.branch_input(x), cache, slot, relation)
        return join.combine(x, self.dropout(y))

    def write(
        self, x: Tensor, cache: LayerCache | RecurrentKernelState, slot: int, relation: AttentionMask
    ) -> None:
        """Write one token x (B, 1, C) into the cache without computing its output."""
        self.attention.write(self.attention_norm.branch_input(x), cache, slot, relation)

    def feed(self, x: Tensor) -> Tensor:
        """Apply the feed-forward sublayer: x (B, T, C) -> (B, T, C)."""
        join = self.feed_forward_norm
        return join.combine(x, self.feed_branch(join.branch_input(x)))

    def feed_branch(self, x: Tensor) -> Tensor:
        """Compute the feed-forward branch for normalized x (B, T, C), without the residual connection."""
        y: Tensor = self.dropout(self.feed_forward(x))
        return y

    def cache(self, memory: Tensor, index: TokenIndex, tables: DistanceTables) -> LayerCache:
        """Create the KV cache of the memory tokens (B, S, C)."""
        return self.attention.cache(self._project(memory), index, tables)

    def far_cache(self, near: LayerCache, tokens: Tensor) -> FarLayerCache:
        """Extend the cache of the local tokens by far tokens (B, F, C), for a layer with kNN attention."""
        assert isinstance(self.attention, KNNAttention)
        far = self.attention.far(self._project(tokens))
        return FarLayerCache(near.keys, near.values, near.table, *far)

    def prepare_keys(self, x: Tensor, index: TokenIndex) -> tuple[Tensor, Tensor]:
        """Return position-encoded keys and values (B, H, S, D) of tokens x (B, S, C) at an index (B, S)."""
        assert isinstance(self.attention, Attention)
        return self.attention.prepare_keys(self._project(x), index.position)

    def content_query(self, x: Tensor) -> Tensor:
        """Return queries (B, H, T, D) of tokens x (B, T, C), without position encoding."""
        assert isinstance(self.attention, Attention)
        return self.attention.project_queries(self.attention_norm.normalize(x))[..., : self.attention.size]

    def content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, S, D) of tokens x (B, S, C), without position encoding."""
        k, v, *_ = self._project(x)
        return k, v

    def recurrent_state(self, memory: Tensor, index: TokenIndex) -> RecurrentKernelState:
        """Compute the state of a recurrent kernel from the memory tokens (B, S, C)."""
        assert isinstance(self.attention, Attention)
        return self.attention.recurrent_state(self._project(memory), index)

    def project_memory(self, memory: Tensor | None) -> Projected | None:
        """Project keys and values of the memory tokens (B, M, C); None without memory."""
        return None if memory is None else self._project(memory)

    def _project(self, memory: Tensor) -> Projected:
        return self.attention.project(memory, self.attention_norm.project)
