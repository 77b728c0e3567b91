"""One layer: attention and feed-forward, each with its norm and residual."""

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
    """A decoder's look at its context: norm, attention and residual, without positions."""

    def __init__(self, spec: "TransformerSpec"):
        super().__init__()
        self.join = NORMS[spec.norm](spec.width, spec.heads, spec.residual)
        self.attention = Attention(spec.width, spec.heads, None, spec.kernel, spec.dropout)
        self.dropout = Dropout(spec.dropout)

    def project(self, context: Tensor) -> Projected:
        """Keys and values of the context's tokens (B, N, C)."""
        return self.attention.project(context)

    def forward(self, x: Tensor, context: Projected, relation: Relation) -> Tensor:
        """x (B, T, C) over the context's projected keys and values (B, H, S, D) -> (B, T, C)."""
        y = self.attention.cross(self.join.enter(x), context, relation)
        return self.join.leave(x, self.dropout(y))


class Block(nn.Module):
    """One layer of a `Transformer`: `attend` or `step`, in a decoder `cross`, then `think`."""

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
        """Leave out what only extra tokens ask: in the last layer nobody reads them any more."""
        assert isinstance(self.attention, SidedAttention)
        self.attention = self.attention.others

    def attend(self, x: Tensor, memory: Tensor | None, relation: Relation) -> Tensor:
        """Self-attention of the segment x (B, T, C) over memory (B, M, C) and itself -> (B, Tq, C)."""
        join = self.join_attention
        return join.leave(relation.queries(x), self.look(join.enter(x), memory, relation))

    def look(self, x: Tensor, memory: Tensor | None, relation: Relation) -> Tensor:
        """What attention adds to the stream, for x (B, T, C) behind its norm."""
        y: Tensor = self.dropout(self.attention(x, self.remembered(memory), relation))
        return y

    def weights(self, x: Tensor, memory: Tensor | None, relation: Relation) -> Tensor:
        """What each token of x (B, T, C) takes of memory (B, M, C) and of x: (B, H, T, M + T)."""
        return self.attention.weights(self.join_attention.read(x), self.remembered(memory), relation)

    def step(self, x: Tensor, cache: LayerCache | LayerMemory, slot: int, relation: Relation) -> Tensor:
        """Self-attention of one token x (B, 1, C) over the cache, itself included -> (B, 1, C)."""
        join = self.join_attention
        y = self.attention.step(join.enter(x), cache, slot, relation)
        return join.leave(x, self.dropout(y))

    def write(self, x: Tensor, cache: LayerCache | LayerMemory, slot: int, relation: Relation) -> None:
        """Put one token x (B, 1, C) into the cache, for later ones to see."""
        self.attention.write(self.join_attention.enter(x), cache, slot, relation)

    def think(self, x: Tensor) -> Tensor:
        """Feed-forward: x (B, T, C) -> (B, T, C)."""
        join = self.join_feed_forward
        return join.leave(x, self.consider(join.enter(x)))

    def consider(self, x: Tensor) -> Tensor:
        """What feed-forward adds to the stream, for x (B, T, C) behind its norm."""
        y: Tensor = self.dropout(self.feed_forward(x))
        return y

    def cache(self, memory: Tensor, index: Index, tables: Tables) -> LayerCache:
        """Keys and values of the tokens of memory (B, S, C)."""
        return self.attention.cache(self._project(memory), index, tables)

    def far_cache(self, near: LayerCache, tokens: Tensor) -> FarLayerCache:
        """The cache of a layer that finds tokens (B, F, C) far back, given that of the near ones."""
        assert isinstance(self.attention, MemorizingAttention)
        far = self.attention.far(self._project(tokens))
        return FarLayerCache(near.keys, near.values, near.table, *far)

    def heard(self, x: Tensor, index: Index) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, D), as queries meet them, of tokens x (B, S, C) at an index (B, S)."""
        assert isinstance(self.attention, Attention)
        return self.attention.heard(self._project(x), index.position)

    def content_query(self, x: Tensor) -> Tensor:
        """Queries (B, H, T, D) of tokens x (B, T, C), before positions change them."""
        assert isinstance(self.attention, Attention)
        return self.attention.ask(self.join_attention.read(x))[..., : self.attention.size]

    def content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, D) of tokens x (B, S, C), before positions change them."""
        k, v, *_ = self._project(x)
        return k, v

    def remember(self, memory: Tensor, index: Index) -> LayerMemory:
        """What a recurrent kernel keeps of the tokens of memory (B, S, C)."""
        assert isinstance(self.attention, Attention)
        return self.attention.remember(self._project(memory), index)

    def remembered(self, memory: Tensor | None) -> Projected | None:
        """Keys and values of the tokens of memory (B, M, C), if there is one."""
        return None if memory is None else self._project(memory)

    def _project(self, memory: Tensor) -> Projected:
        return self.attention.project(memory, self.join_attention.project)
