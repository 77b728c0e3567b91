"""What acting from a kNN memory keeps between steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from rlxf.attention.attention import LayerCache
from rlxf.attention.cache import Cache
from rlxf.attention.index import Index
from rlxf.attention.memory.far import FarRelation
from rlxf.attention.memory.state import State, joined
from rlxf.attention.relation import Relation

if TYPE_CHECKING:
    from rlxf.attention.memory.knn import KNN

SPARE = 8
"""Room for far tokens is larger than what can be found by one part in so many: as rarely it is moved."""


class FindingLayer(Protocol):
    """The layer that finds far tokens."""

    def far_cache(self, near: LayerCache, tokens: Tensor) -> LayerCache:
        """The cache of that layer, with the keys and values of tokens (B, F, C) that may be far."""
        ...


@dataclass(eq=False)
class Written:
    """How far a room is written, from its start, by whoever of those that share it went farthest."""

    slots: int


@dataclass(eq=False)
class KNNCache(Cache):
    """A `Cache` with room in one layer for all tokens that are far, or will be.

    Copies share that room, thousands of tokens: nobody writes a slot of it twice. Who finds the next slot
    written by another copy, or the room full, takes what can still be found to a room of its own.

    Args:
        memory: says what is far.
        number: the pass that finds far tokens.
        far: (B, F), where the tokens of the room stand; empty for what other copies wrote.
        far_slot: where the next token goes there.
        reach: how many tokens before that one can be found.
        written: shared as the room is.
    """

    memory: "KNN"
    number: int
    far: Index
    far_slot: int
    reach: int
    written: Written

    @classmethod
    def begin(cls, near: Cache, layer: FindingLayer, memory: "KNN", state: State) -> "KNNCache":
        """A cache that goes on from a state, given one of what is near."""
        number = memory.number(len(near.layers))
        before = [] if state.older is None else [state.older]
        kept = joined([*before, State(state.hidden[[number]], state.index)])
        spare = max(1, near.index.shape[1] - state.index.shape[1])
        slot = kept.index.shape[1]
        reach = max(slot, memory.holds) + spare - 1
        more = reach + 1 - slot + reach // SPARE
        room = State.empty(1, len(near.index.episode), more, state.hidden, state.hidden.shape[-1])
        whole = joined([kept, room])
        layers = list(near.layers)
        first = layers[number]
        assert isinstance(first, LayerCache)
        layers[number] = layer.far_cache(first, whole.hidden[0])
        ring = near.index, near.slot, near.tables, near.context
        return cls(layers, *ring, memory, number, whole.index, slot, reach, Written(slot))

    def write(self, index: Index) -> int:
        """See `Cache`."""
        if self.far_slot < self.written.slots or self.far_slot == self.far.shape[1]:
            self._move()
        slot = self.far_slot
        self.far.position[:, slot : slot + 1] = index.position
        self.far.episode[:, slot : slot + 1] = index.episode
        self.far_slot = self.written.slots = slot + 1
        return super().write(index)

    @torch.inference_mode(False)
    def _move(self) -> None:
        """Take what can still be found to the start of other room, as large.

        Rollouts act in inference mode; what is made there could not be written outside of it.
        """
        kept = slice(max(0, self.far_slot - self.reach), self.far_slot)
        self.far_slot -= kept.start
        batch, size = self.far.shape
        empty = Index.empty(batch, size - self.far_slot, self.far.position.device)
        self.far, self.written = self.far.at(kept).concatenate(empty), Written(self.far_slot)
        layers: list[Any] = list(self.layers)
        layers[self.number] = layers[self.number].moved(kept)
        self.layers = layers

    def related(self, relations: Sequence[Relation]) -> Sequence[Relation]:
        """See `Cache`."""
        return FarRelation.among(relations, self.number, self.memory, self.far, self.far_slot - 1)

    def rows(self, rows: Tensor) -> "KNNCache":
        """See `Cache`."""
        some = super().rows(rows)
        own = replace(self, layers=some.layers, index=some.index, context=some.context)
        return replace(own, far=self.far.rows(rows), written=Written(self.far_slot))

    def copy(self) -> "KNNCache":
        """See `Cache`: room is shared."""
        layers: Sequence[Any] = self.layers
        index, far = (Index(x.position.clone(), x.episode.clone()) for x in (self.index, self.far))
        return replace(self, layers=[layer.copy() for layer in layers], index=index, far=far)
