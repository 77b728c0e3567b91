"""KV cache for acting with a kNN memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rlxf.attention.attention import LayerCache
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cache import KVCache
from rlxf.attention.memory.base import State, concatenate_states
from rlxf.attention.memory.knn_search import KNNMask
from rlxf.attention.token_index import TokenIndex

if TYPE_CHECKING:
    from rlxf.attention.memory.knn import KNN

SPARE = 8
"""The far buffer has 1 / SPARE more slots than retrievable tokens, so that it is rarely compacted."""


class KNNLayer(Protocol):
    """Interface of the kNN layer."""

    def far_cache(self, near: LayerCache, tokens: Tensor) -> LayerCache:
        """Extend the cache of the local tokens by the keys and values of far tokens (B, F, C)."""
        ...


@dataclass(eq=False)
class WriteCounter:
    """Number of slots of a far buffer that any of the caches that share it has written."""

    slots: int


@dataclass(eq=False)
class KNNCache(KVCache):
    """`KVCache` with a far buffer in the kNN layer, for all tokens that are or become far.

    Copies share the far buffer of thousands of tokens, and each slot is written once (copy on write). A cache
    whose next slot was written by another copy, or whose buffer is full, moves the retrievable tokens to a
    new buffer.

    Args:
        memory: memory technique, which defines the far tokens.
        number: number of the pass with kNN attention.
        far: (B, F), index of the tokens in the buffer; empty for slots that other copies wrote.
        far_slot: slot of the next token in the buffer.
        reach: number of tokens before ``far_slot`` that can be retrieved.
        written: number of written slots, shared with the buffer.
    """

    memory: "KNN"
    number: int
    far: TokenIndex
    far_slot: int
    reach: int
    written: WriteCounter

    @classmethod
    def from_state(cls, near: KVCache, layer: KNNLayer, memory: "KNN", state: State) -> "KNNCache":
        """Create a cache from a state and the cache of its local tokens."""
        number = memory.number(len(near.layers))
        older = [] if state.older is None else [state.older]
        stored = concatenate_states([*older, State(state.hidden[[number]], state.index)])
        spare = max(1, near.index.shape[1] - state.index.shape[1])
        slot = stored.index.shape[1]
        reach = max(slot, memory.holds) + spare - 1
        free_slots = reach + 1 - slot + reach // SPARE
        free = State.empty(1, len(near.index.episode), free_slots, state.hidden, state.hidden.shape[-1])
        buffer = concatenate_states([stored, free])
        layers = list(near.layers)
        local = layers[number]
        assert isinstance(local, LayerCache)
        layers[number] = layer.far_cache(local, buffer.hidden[0])
        ring = near.index, near.slot, near.tables, near.context
        return cls(layers, *ring, memory, number, buffer.index, slot, reach, WriteCounter(slot))

    def write(self, index: TokenIndex) -> int:
        """See `KVCache`."""
        if self.far_slot < self.written.slots or self.far_slot == self.far.shape[1]:
            self._move()
        slot = self.far_slot
        self.far.position[:, slot : slot + 1] = index.position
        self.far.episode[:, slot : slot + 1] = index.episode
        self.far_slot = self.written.slots = slot + 1
        return super().write(index)

    @torch.inference_mode(False)
    def _move(self) -> None:
        """Move the retrievable tokens to the start of a new buffer of the same size.

        Rollouts run in inference mode. Tensors created in that mode cannot be modified outside of it.
        """
        kept = slice(max(0, self.far_slot - self.reach), self.far_slot)
        self.far_slot -= kept.start
        batch, size = self.far.shape
        empty = TokenIndex.empty(batch, size - self.far_slot, self.far.position.device)
        self.far, self.written = self.far.at(kept).concatenate(empty), WriteCounter(self.far_slot)
        layers: list[Any] = list(self.layers)
        layers[self.number] = layers[self.number].moved(kept)
        self.layers = layers

    def adapt_masks(self, relations: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        """See `KVCache`."""
        return KNNMask.extend(relations, self.number, self.memory, self.far, self.far_slot - 1)

    def rows(self, rows: Tensor) -> "KNNCache":
        """See `KVCache`."""
        local = super().rows(rows)
        selected = replace(self, layers=local.layers, index=local.index, context=local.context)
        return replace(selected, far=self.far.rows(rows), written=WriteCounter(self.far_slot))

    def copy(self) -> "KNNCache":
        """Return a copy of all rows that shares the far buffer."""
        layers: Sequence[Any] = self.layers
        index, far = (TokenIndex(x.position.clone(), x.episode.clone()) for x in (self.index, self.far))
        return replace(self, layers=[layer.copy() for layer in layers], index=index, far=far)
