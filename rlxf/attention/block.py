"""Transformer layer: attention and feed-forward sublayers, each with layer norm and residual connection."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlxf.attention.attention import Attention, LayerCache, Projected
from rlxf.attention.dropout import Dropout
from rlxf.attention.feed_forward import FeedForward
from rlxf.attention.index import Index
from rlxf.attention.kernels.base import LayerMemory
from rlxf.attention.memorizing import FarLayerCache, MemorizingAttention
from rlxf.attention.norm import NORMS, joins
from rlxf.attention.relation import Relation, Tables
from rlxf.attention.sides import SidedAttention, self_attention

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

    def forward(self, x: Tensor, context: Projected, relation: Relation) -> Tensor:
        """Attend from x (B, T, C) over the projected context (B, H, N, D) -> (B, T, C)."""
        y = self.attention.cross(self.join.enter(x), context, relation)
        return self.join.leave(x, self.dropout(y))


class Block(nn.Module):
    """One layer of a `Transformer`.

    The order is `attend` for a segment or `step` for one token, then `cross` in a decoder, then `think`.
    """

    def __init__(self, spec: "TransformerSpec"):
        super().__init__()
        join_attention, join_feed_forward = joins(spec.norm, spec.width, spec.heads, spec.residual)
        self.join_attention = join_attention
        self.attention = self_attention(spec)
        self.cross = CrossAttention(spec) if spec.cross_attention else None
        self.join_feed_forward = join_feed_forward
        self.feed_forward = FeedForward(
            spec.width, spec.inner_width, spec.activation, spec.feed_forward_chunk
        )
        self.compression = None if spec.memory is None else spec.memory.build(spec.width)
        self.dropout = Dropout(spec.dropout)

    def forget_globals(self) -> None:
        """Remove the global attention: in the last layer the outputs of global tokens are unused."""
        assert isinstance(self.attention, SidedAttention)
        self.attention = self.attention.others

    def attend(self, x: Tensor, memory: Tensor | None, relation: Relation) -> Tensor:
        """Apply self-attention of the segment x (B, T, C) over memory (B, M, C) and x -> (B, Tq, C)."""
        join = self.join_attention
        return join.leave(relation.queries(x), self.look(join.enter(x), memory, relation))

    def look(self, x: Tensor, memory: Tensor | None, relation: Relation) -> Tensor:
        """Compute the attention branch for normalized x (B, T, C), without the residual connection."""
        y: Tensor = self.dropout(self.attention(x, self.remembered(memory), relation))
        return y

    def weights(self, x: Tensor, memory: Tensor | None, relation: Relation) -> Tensor:
        """Return attention weights (B, H, T, M + T) of x (B, T, C) over memory (B, M, C) and x."""
        return self.attention.weights(self.join_attention.read(x), self.remembered(memory), relation)

    def step(self, x: Tensor, cache: LayerCache | LayerMemory, slot: int, relation: Relation) -> Tensor:
        """Apply self-attention of one token x (B, 1, C) over the cache, which includes x -> (B, 1, C)."""
        join = self.join_attention
        y = self.attention.step(join.enter(x), cache, slot, relation)
        return join.leave(x, self.dropout(y))

    def write(self, x: Tensor, cache: LayerCache | LayerMemory, slot: int, relation: Relation) -> None:
        """Write one token x (B, 1, C) into the cache without computing its output."""
        self.attention.write(self.join_attention.enter(x), cache, slot, relation)

    def think(self, x: Tensor) -> Tensor:
        """Apply the feed-forward sublayer: x (B, T, C) -> (B, T, C)."""
        join = self.join_feed_forward
        return join.leave(x, self.consider(join.enter(x)))

    def consider(self, x: Tensor) -> Tensor:
        """Compute the feed-forward branch for normalized x (B, T, C), without the residual connection."""
        y: Tensor = self.dropout(self.feed_forward(x))
        return y

    def cache(self, memory: Tensor, index: Index, tables: Tables) -> LayerCache:
        """Create the KV cache of the memory tokens (B, S, C)."""
        return self.attention.cache(self._project(memory), index, tables)

    def far_cache(self, near: LayerCache, tokens: Tensor) -> FarLayerCache:
        """Extend the cache of the local tokens by far tokens (B, F, C), for a layer with kNN attention."""
        assert isinstance(self.attention, MemorizingAttention)
        far = self.attention.far(self._project(tokens))
        return FarLayerCache(near.keys, near.values, near.table, *far)

    def heard(self, x: Tensor, index: Index) -> tuple[Tensor, Tensor]:
        """Return position-encoded keys and values (B, H, S, D) of tokens x (B, S, C) at an index (B, S)."""
        assert isinstance(self.attention, Attention)
        return self.attention.heard(self._project(x), index.position)

    def content_query(self, x: Tensor) -> Tensor:
        """Return queries (B, H, T, D) of tokens x (B, T, C), without position encoding."""
        assert isinstance(self.attention, Attention)
        return self.attention.ask(self.join_attention.read(x))[..., : self.attention.size]

    def content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, S, D) of tokens x (B, S, C), without position encoding."""
        k, v, *_ = self._project(x)
        return k, v

    def remember(self, memory: Tensor, index: Index) -> LayerMemory:
        """Compute the state of a recurrent kernel from the memory tokens (B, S, C)."""
        assert isinstance(self.attention, Attention)
        return self.attention.remember(self._project(memory), index)

    def remembered(self, memory: Tensor | None) -> Projected | None:
        """Project keys and values of the memory tokens (B, M, C); None without memory."""
        return None if memory is None else self._project(memory)

    def _project(self, memory: Tensor) -> Projected:
        return self.attention.project(memory, self.join_attention.project)
