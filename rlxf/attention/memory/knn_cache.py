"""What acting from a kNN memory keeps between steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from rlxf.attention.attention import LayerCache
from rlxf.attention.cache import Cache
from rlxf.attention.index import Index
from rlxf.attention.memory.far import FarRelation
from rlxf.attention.memory.state import State, joined
from rlxf.attention.relation import Relation

if TYPE_CHECKING:
    from rlxf.attention.memory.knn import KNN


class FindingLayer(Protocol):
    """The layer that finds far tokens."""

    def far_cache(self, near: LayerCache, tokens: Tensor) -> LayerCache:
        """The cache of that layer, with the keys and values of tokens (B, F, C) that may be far."""
        ...


@dataclass(eq=False)
class KNNCache(Cache):
    """A `Cache` with a second ring in one layer, for all tokens that are far, or will be.

    Args:
        memory: says what is far.
        number: the pass that finds far tokens.
        far: (B, F), where the tokens of the second ring stand.
        far_slot: where the next token goes there.
    """

    memory: "KNN"
    number: int
    far: Index
    far_slot: int

    @classmethod
    def begin(cls, near: Cache, layer: FindingLayer, memory: "KNN", state: State) -> "KNNCache":
        """A cache that goes on from a state, given one of what is near."""
        number = memory.number(len(near.layers))
        before = [] if state.older is None else [state.older]
        kept = joined([*before, State(state.hidden[[number]], state.index)])
        spare = max(1, near.index.shape[1] - state.index.shape[1])
        short = max(0, memory.holds - kept.index.shape[1])
        room = State.empty(1, len(near.index.episode), spare + short, state.hidden, state.hidden.shape[-1])
        ring = joined([kept, room])
        layers = list(near.layers)
        first = layers[number]
        assert isinstance(first, LayerCache)
        layers[number] = layer.far_cache(first, ring.hidden[0])
        slot = kept.index.shape[1] % ring.index.shape[1]
        return cls(layers, near.index, near.slot, near.tables, near.context, memory, number, ring.index, slot)

    def write(self, index: Index) -> int:
        """See `Cache`."""
        slot = self.far_slot
        self.far.position[:, slot : slot + 1] = index.position
        self.far.episode[:, slot : slot + 1] = index.episode
        self.far_slot = (slot + 1) % self.far.shape[1]
        return super().write(index)

    def related(self, relations: Sequence[Relation]) -> Sequence[Relation]:
        """See `Cache`."""
        written = (self.far_slot - 1) % self.far.shape[1]
        return FarRelation.among(relations, self.number, self.memory, self.far, written)

    def rows(self, rows: Tensor) -> "KNNCache":
        """See `Cache`."""
        some = super().rows(rows)
        return replace(
            self, layers=some.layers, index=some.index, context=some.context, far=self.far.rows(rows)
        )
