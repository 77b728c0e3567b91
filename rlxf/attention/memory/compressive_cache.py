"""What acting from a compressive memory keeps between steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rlxf.attention.attention import LayerCache
from rlxf.attention.cache import Cache
from rlxf.attention.context import ProjectedContext
from rlxf.attention.index import EMPTY, Index
from rlxf.attention.kernels.stretches import MISSING, Stretches
from rlxf.attention.memory.compressive_recall import (
    CompressedRelation,
    CompressingLayer,
    compressed,
    index_at,
    laid_out,
)
from rlxf.attention.memory.state import State
from rlxf.attention.relation import Relation, Tables, find_slots

if TYPE_CHECKING:
    from rlxf.attention.memory.compressive import Compressive


class ActingLayer(CompressingLayer, Protocol):
    """A layer that compresses its inputs and acts."""

    def heard(self, x: Tensor, index: Index) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, S, D) of tokens x (B, S, C) that stand at an index (B, S)."""
        ...

    def cache(self, memory: Tensor, index: Index, tables: Tables) -> LayerCache:
        """Keys and values of the tokens of memory (B, S, C)."""
        ...


@dataclass(frozen=True, eq=False)
class Arrival:
    """Where the inputs of a step go.

    Args:
        rows: (R,) int64, rows that have a token in this step.
        places: (R,) int64, its place in its block, from 0.
        whole: (W,) int64, rows whose block it makes whole.
        slots: (W,) int64, where that block goes.
        ends: (W, 1), where it stands.
    """

    rows: Tensor
    places: Tensor
    whole: Tensor
    slots: Tensor
    ends: Index


@dataclass(eq=False)
class CompressiveCache(Cache):
    """A `Cache` whose first slots are for compressed blocks; and the inputs of a block that is not yet whole.

    Block k of an episode has slot k mod N': as many as are seen, and those that wait until they are.

    Args:
        memory: says who sees what.
        blocks: the layer of each pass.
        inputs: (L, B, c, C), of the last tokens, by their place in their block.
        standing: (B, c), where those stand.
        arrival: of the step at hand.
    """

    memory: "Compressive"
    blocks: Sequence[ActingLayer]
    inputs: Tensor
    standing: Index
    arrival: Arrival | None = None

    @classmethod
    def begin(
        cls,
        memory: "Compressive",
        blocks: Sequence[ActingLayer],
        state: State,
        capacity: int,
        tables: Tables,
        context: ProjectedContext | None,
    ) -> "CompressiveCache":
        """A cache that goes on from a state, with room for what a step sees, and for spare empty slots.

        Slots are spare if ``capacity`` is more than the tokens of the state and one.
        """
        kept = state.last(min(memory.raw, state.index.shape[1]))
        ring = memory.raw + 1 + max(0, capacity - state.index.shape[1] - 1)
        room = ring - kept.index.shape[1]
        old, open_ = blocks_of(state.index, memory)
        more = State.empty(len(blocks), len(kept.index.episode), room, state.hidden, state.hidden.shape[-1])
        index = index_at(state.index, old.slots[..., -1]).concatenate(kept.index).concatenate(more.index)
        layers = [
            layer.cache(torch.cat([compressed(layer, laid_out(h, old)), k, m], dim=1), index, tables)
            for layer, h, k, m in zip(blocks, state.hidden, kept.hidden, more.hidden, strict=True)
        ]
        inputs = torch.stack([laid_out(h, open_)[:, 0] for h in state.hidden])
        standing = index_at(state.index, open_.slots[:, 0])
        return cls(
            layers, index, kept.index.shape[1] % ring, tables, context, memory, blocks, inputs, standing
        )

    def related(self, relations: Sequence[Relation]) -> Sequence[Relation]:
        """See `Cache`."""
        return CompressedRelation.of(relations, self.memory, self.memory.waiting)

    def write(self, index: Index) -> int:
        """See `Cache`; also where the block stands that the token makes whole."""
        first, ratio = self.memory.waiting, self.memory.ratio
        slot = first + self.slot
        self.slot = (self.slot + 1) % (self.index.shape[1] - first)
        put(self.index, slice(None), slot, index.at(slice(0, 1)))
        position, episode = index.position[:, 0], index.episode[:, 0]
        rows = (episode != EMPTY).nonzero()[:, 0]
        places = position[rows] % ratio
        put(self.standing, rows, places, index.rows(rows))
        whole = rows[self._is_whole(position, episode)[rows]]
        slots = position[whole] // ratio % first
        self.arrival = Arrival(rows, places, whole, slots, index.rows(whole))
        put(self.index, whole, slots, index.rows(whole))
        return slot

    def _is_whole(self, position: Tensor, episode: Tensor) -> Tensor:
        """(B,) bool: whether the token at position (B,) ends a block that has all of its tokens."""
        ratio = self.memory.ratio
        places = torch.arange(1 - ratio, 1, device=position.device)
        there = self.standing.position == position[:, None] + places
        there &= self.standing.episode == episode[:, None]
        return there.all(1) & (position % ratio == ratio - 1)

    def enter(self, number: int, x: Tensor) -> None:
        """See `Cache`: the blocks that x makes whole are compressed."""
        assert self.arrival is not None
        arrival, layer, ring = self.arrival, self.blocks[number], self.layers[number]
        self.inputs[number, arrival.rows, arrival.places] = x[arrival.rows, 0]
        if not len(arrival.whole):
            return
        assert isinstance(ring, LayerCache)
        summaries = compressed(layer, self.inputs[number, arrival.whole][:, None])
        k, v = layer.heard(summaries, arrival.ends)
        ring.keys[arrival.whole, :, arrival.slots] = k[:, :, 0]
        ring.values[arrival.whole, :, arrival.slots] = v[:, :, 0]

    def rows(self, rows: Tensor) -> "CompressiveCache":
        """See `Cache`."""
        some = super().rows(rows)
        return CompressiveCache(
            some.layers,
            some.index,
            some.slot,
            some.tables,
            some.context,
            self.memory,
            self.blocks,
            self.inputs[:, rows],
            self.standing.rows(rows),
        )


def put(index: Index, rows: Tensor | slice, slots: Tensor | int, tokens: Index) -> None:
    """Note where tokens (R, 1) of some rows stand, a slot for each, in place."""
    index.position[rows, slots] = tokens.position[:, 0]
    index.episode[rows, slots] = tokens.episode[:, 0]


def blocks_of(index: Index, memory: "Compressive") -> tuple[Stretches, Stretches]:
    """Of the episode that a row is in, the last whole blocks by their slots in a cache, and the one begun.

    They are (B, N', c), without those that lack a token, and (B, 1, c).
    """
    batch, ratio, count = index.shape[0], memory.ratio, memory.waiting
    newest = last_tokens(index)
    begun = (newest.position + 1).div(ratio, rounding_mode="floor")
    slots = torch.arange(count, device=begun.device)
    number = begun - 1 - (begun - 1 - slots) % count
    wanted = torch.cat([number, begun], dim=1)[..., None] * ratio + torch.arange(ratio, device=begun.device)
    found = find_slots(index, Index(wanted.flatten(1), newest.episode.expand(batch, wanted[0].numel())))
    found = found.view_as(wanted).masked_fill((newest.episode == EMPTY)[..., None] | (wanted < 0), MISSING)
    old, open_ = found.split([count, 1], dim=1)
    lacking = (old == MISSING).any(-1, keepdim=True)
    return Stretches(old.masked_fill(lacking, MISSING)), Stretches(open_)


def last_tokens(index: Index) -> Index:
    """Where the last token of each row stands, (B, 1); empty if there is none."""
    slots = torch.arange(index.shape[1], device=index.episode.device)
    filled = torch.where(index.episode == EMPTY, MISSING, slots)
    last = torch.cat([torch.full_like(index.episode[:, :1], MISSING), filled], dim=1)
    return index_at(index, last.amax(1, keepdim=True))
