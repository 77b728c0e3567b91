"""Layers of a transformer: attention or a recurrence, cross-attention and feed-forward network."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlxf.attention.attention import Attention, LayerCache, LayerStep, PassCache, Projected
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments
from rlxf.attention.cache import KVCache, NoKeys
from rlxf.attention.dropout import Dropout
from rlxf.attention.feed_forward import FeedForward, build_feed_forward
from rlxf.attention.linear import bound, fused_step, own_method
from rlxf.attention.memory.base import State
from rlxf.attention.norm import PreNorm
from rlxf.attention.patterns.base import UNLIMITED
from rlxf.attention.recurrent.base import MixerState, RecurrentMixer
from rlxf.attention.relative import DistanceTables
from rlxf.attention.technique import AttentionFactory, SpecView
from rlxf.attention.token_index import TokenIndex

if TYPE_CHECKING:
    from rlxf.attention.layer_stack import SegmentStack, StepStack


def build_self_attention(spec: SpecView) -> Any:
    """Build the self-attention module of a layer: an `Attention`, or what a technique requires instead."""
    build: AttentionFactory = Attention
    for technique in (spec.position, spec.kernel, spec.memory, spec.pattern):
        build = build if technique is None else technique.attention_class(build)
    return build(_attention_arguments(spec, spec.position))


def _attention_arguments(spec: SpecView, position: Any) -> AttentionArguments:
    return AttentionArguments(
        width=spec.width,
        heads=spec.heads,
        position=position,
        kernel=spec.kernel,
        dropout=spec.dropout,
        options=spec.attention_options,
    )


class Layer(nn.Module, ABC):
    """One layer of a `Transformer`: a token mixer, then cross-attention in a decoder, then feed-forward.

    The token mixer is self-attention (`Block`) or a recurrence (`RecurrentBlock`). Its methods receive the
    number of the pass, its input x, and all passes of the call.
    """

    cross: "CrossAttention | None"
    feed_forward_norm: PreNorm
    feed_forward: FeedForward
    dropout: Dropout

    @property
    @abstractmethod
    def max_distance(self) -> int:
        """Largest distance, in tokens, at which a key of this layer can have weight."""

    @abstractmethod
    def cache(self, memory: Tensor, index: TokenIndex, tables: DistanceTables) -> LayerCache | NoKeys:
        """Create the KV cache of the memory tokens (B, S, C)."""

    @abstractmethod
    def recurrent_state(self, memory: Tensor, index: TokenIndex) -> PassCache | NoKeys:
        """Compute the state of a recurrent kernel from the memory tokens (B, S, C)."""

    @abstractmethod
    def mix_segment(self, number: int, x: Tensor, passes: "SegmentStack", queries: slice | None) -> Tensor:
        """Apply the token mixer to a segment x (B, T, C) -> (B, Tq, C), the tokens ``queries``."""

    @abstractmethod
    def skip_segment(self, number: int, x: Tensor, passes: "SegmentStack") -> None:
        """Read a segment x (B, T, C) whose outputs are not needed."""

    @property
    @abstractmethod
    def mixer_sublayer(self) -> PreNorm:
        """Norm of the token mixer, together with its residual connection."""

    @abstractmethod
    def step_function(self, number: int, passes: "StepStack") -> Callable[[Tensor], Tensor]:
        """Return the token mixer for one token (B, 1, C) -> (B, 1, C), which updates the cache."""

    @abstractmethod
    def skip_step(self, number: int, x: Tensor, passes: "StepStack") -> None:
        """Read one token x (B, 1, C) whose output is not needed, and update the cache."""

    def initial_state(self, batch: int) -> MixerState:
        """Return the state of the token mixer before the first token; empty for attention."""
        return {}

    def _build_feed_forward(self, spec: SpecView, norm: PreNorm) -> None:
        self.cross = CrossAttention(spec) if spec.cross_attention else None
        self.feed_forward_norm = norm
        self.feed_forward = build_feed_forward(
            spec.width, spec.inner_width, spec.activation, spec.feed_forward_chunk
        )

    def apply_feed_forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward sublayer: x (B, T, C) -> (B, T, C)."""
        norm = self.feed_forward_norm
        return norm.combine(x, self.feed_forward_branch(norm.branch_input(x)))

    def feed_forward_branch(self, x: Tensor) -> Tensor:
        """Compute the feed-forward branch for normalized x (B, T, C), without the residual connection."""
        y: Tensor = self.dropout(self.feed_forward(x))
        return y


class Block(Layer):
    """Layer with self-attention."""

    def __init__(self, spec: SpecView):
        super().__init__()
        self.attention_norm, feed_forward_norm = spec.residual.build_norms(spec)
        self.attention: Attention = build_self_attention(spec)
        self._build_feed_forward(spec, feed_forward_norm)
        self.compression = None if spec.memory is None else spec.memory.build(spec.width)
        self.dropout = Dropout(spec.dropout)

    @property
    def max_distance(self) -> int:
        return self.attention.max_distance

    def mix_segment(self, number: int, x: Tensor, passes: "SegmentStack", queries: slice | None) -> Tensor:
        memory = passes.view.tokens(number, passes.attention_input(x))
        return self.attend(x, memory, passes.masks[number].select_queries(queries))

    def skip_segment(self, number: int, x: Tensor, passes: "SegmentStack") -> None:
        """Do nothing: the state already contains x."""

    @property
    def mixer_sublayer(self) -> PreNorm:
        return self.attention_norm

    def step_function(self, number: int, passes: "StepStack") -> Callable[[Tensor], Tensor]:
        cache = passes.cache.of_attention(number)
        mask = passes.masks[number]
        return partial(self.attention.step, cache=cache, slot=passes.slot, mask=mask)

    def skip_step(self, number: int, x: Tensor, passes: "StepStack") -> None:
        h = self.attention_norm.branch_input(x)
        cache = passes.cache.of_attention(number)
        self.attention.write(h, cache, passes.slot, passes.masks[number])

    def fused_step(self) -> LayerStep | None:
        """Return the layer for a `FusedStep`; None if one of its parts has no such form."""
        attend, feed = fused_step(self.attention), bound(self.feed_forward)
        around_attention = own_method(self.attention_norm, "bind_around")
        around_feed_forward = own_method(self.feed_forward_norm, "bind_around")
        if attend is None or self.cross is not None or not around_attention or not around_feed_forward:
            return None
        attention, feed_forward = around_attention(attend), around_feed_forward(feed)
        return lambda x, cache, keys: feed_forward(attention(x, cache, keys))

    def attend(self, x: Tensor, memory: Tensor | None, mask: AttentionMask) -> Tensor:
        """Apply self-attention of the segment x (B, T, C) over memory (B, M, C) and x -> (B, Tq, C)."""
        norm = self.attention_norm
        return norm.combine(mask.queries(x), self.attention_branch(norm.branch_input(x), memory, mask))

    def attention_branch(self, x: Tensor, memory: Tensor | None, mask: AttentionMask) -> Tensor:
        """Compute the attention branch for normalized x (B, T, C), without the residual connection."""
        return self.dropout(self.attention(x, self._project_memory(memory), mask))

    def weights(self, x: Tensor, memory: Tensor | None, mask: AttentionMask) -> Tensor:
        """Return attention weights (B, H, T, M + T) of x (B, T, C) over memory (B, M, C) and x."""
        return self.attention.weights(self.attention_norm.normalize(x), self._project_memory(memory), mask)

    def cache(self, memory: Tensor, index: TokenIndex, tables: DistanceTables) -> LayerCache:
        """Create the KV cache of the memory tokens (B, S, C)."""
        return self.attention.cache(self.project(memory), index, tables)

    def recurrent_state(self, memory: Tensor, index: TokenIndex) -> PassCache:
        """Compute the state of a recurrent kernel from the memory tokens (B, S, C)."""
        return self.attention.recurrent_state(self.project(memory), index)

    def prepare_keys(self, x: Tensor, index: TokenIndex) -> tuple[Tensor, Tensor]:
        """Return position-encoded keys and values (B, K, S, D) of tokens x (B, S, C) at an index (B, S)."""
        return self.attention.prepare_keys(self.project(x), index.position)

    def content_query(self, x: Tensor) -> Tensor:
        """Return queries (B, H, T, D) of tokens x (B, T, C), without position encoding."""
        return self.attention.project_queries(self.attention_norm.normalize(x))[..., : self.attention.size]

    def content(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, S, D) of tokens x (B, S, C), without position encoding."""
        k, v, *_ = self.project(x)
        return self.attention.repeat_keys(self.attention.key_norm(k), v)

    def project(self, memory: Tensor) -> Projected:
        """Project keys and values of the memory tokens (B, M, C)."""
        norm = self.attention_norm
        if self.attention.can_fuse_norm:
            return self.attention.project(memory, norm.project)
        return self.attention.project(norm.normalize(memory))

    def _project_memory(self, memory: Tensor | None) -> Projected | None:
        return None if memory is None else self.project(memory)


@dataclass(frozen=True, eq=False)
class RecurrentKernelLayer:
    """Layer with attention, as a builder of its part of a `KVCache`: the state of its recurrent kernel."""

    layer: Layer

    def cache(self, memory: Tensor, index: TokenIndex, tables: DistanceTables) -> PassCache | NoKeys:
        """Compute the state from the memory tokens (B, S, C)."""
        return self.layer.recurrent_state(memory, index)


def recurrent_cache(state: State, layers: Sequence[Layer]) -> KVCache:
    """Create a cache of recurrent kernel states, with one slot for the current token.

    Args:
        state: memory state.
        layers: layer of each pass.
    """
    states = [layer.recurrent_state(h, state.index) for layer, h in zip(layers, state.hidden, strict=True)]
    index = TokenIndex.empty(state.index.shape[0], 1, state.hidden.device)
    tables = DistanceTables(torch.zeros(1, dtype=torch.long, device=state.hidden.device), None, 0)
    return KVCache(states, index, 0, tables)


class RecurrentBlock(Layer):
    """Layer with a recurrent mixer in place of self-attention."""

    def __init__(self, spec: SpecView):
        super().__init__()
        self.mixer_norm, feed_forward_norm = spec.residual.build_norms(spec)
        self.mixer: RecurrentMixer = spec.recurrence.build(spec.width, spec.heads)
        self._build_feed_forward(spec, feed_forward_norm)
        self.dropout = Dropout(spec.dropout)

    @property
    def max_distance(self) -> int:
        return UNLIMITED

    def mix_segment(self, number: int, x: Tensor, passes: "SegmentStack", queries: slice | None) -> Tensor:
        queries = queries or slice(None)
        y = passes.mix(number, self.mixer, self.mixer_norm.branch_input(x))[:, queries]
        return self.mixer_norm.combine(x[:, queries], self.dropout(y))

    def skip_segment(self, number: int, x: Tensor, passes: "SegmentStack") -> None:
        passes.mix(number, self.mixer, self.mixer_norm.branch_input(x))

    @property
    def mixer_sublayer(self) -> PreNorm:
        return self.mixer_norm

    def step_function(self, number: int, passes: "StepStack") -> Callable[[Tensor], Tensor]:
        return partial(passes.mix, number, self.mixer)

    def skip_step(self, number: int, x: Tensor, passes: "StepStack") -> None:
        passes.mix(number, self.mixer, self.mixer_norm.branch_input(x))

    def initial_state(self, batch: int) -> MixerState:
        return self.mixer.initial_state(batch)

    def cache(self, memory: Tensor, index: TokenIndex, tables: DistanceTables) -> NoKeys:
        """Return `NoKeys`; the recurrent state is stored in `KVCache.recurrent`."""
        return NoKeys()

    def recurrent_state(self, memory: Tensor, index: TokenIndex) -> NoKeys:
        """Return `NoKeys`, as `cache` does."""
        return NoKeys()


class CrossAttention(nn.Module):
    """Cross-attention sublayer of a decoder: norm, attention without positions, and residual."""

    def __init__(self, spec: SpecView):
        super().__init__()
        self.join = spec.residual.build_norm(spec)
        build: AttentionFactory = spec.kernel.attention_class(Attention)
        self.attention: Any = build(_attention_arguments(spec, position=None))
        self.dropout = Dropout(spec.dropout)

    def forward(self, x: Tensor, context: Projected, mask: AttentionMask) -> Tensor:
        """Attend from x (B, T, C) over the projected context (B, H, N, D) -> (B, T, C)."""
        y = self.attention.cross(self.join.branch_input(x), context, mask)
        return self.join.combine(x, self.dropout(y))
