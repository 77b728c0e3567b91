"""KV cache for acting with a compressive memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rlxf.attention.attention import LayerCache
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cache import KVCache
from rlxf.attention.kernels.position_blocks import MISSING, PositionBlocks
from rlxf.attention.memory.base import State
from rlxf.attention.memory.compressive_view import (
    CompressedMask,
    CompressingLayer,
    compress_blocks,
    gather_blocks,
    gather_index,
)
from rlxf.attention.relative import DistanceTables
from rlxf.attention.token_index import EMPTY, TokenIndex

if TYPE_CHECKING:
    from rlxf.attention.memory.compressive import Compressive


class CachingLayer(CompressingLayer, Protocol):
    """Interface of a layer that compresses its inputs and has a KV cache."""

    def prepare_keys(self, x: Tensor, index: TokenIndex) -> tuple[Tensor, Tensor]:
        """Return position-encoded keys and values (B, H, S, D) of tokens x (B, S, C) at an index (B, S)."""
        ...

    def cache(self, memory: Tensor, index: TokenIndex, tables: DistanceTables) -> LayerCache:
        """Create the KV cache of the memory tokens (B, S, C)."""
        ...


@dataclass(frozen=True, eq=False)
class StepTargets:
    """Targets of the inputs of one step.

    Args:
        rows: (R,) int64, rows that have a token in this step.
        places: (R,) int64, offset of the token in its block, from 0.
        whole: (W,) int64, rows whose token completes a block.
        slots: (W,) int64, cache slots of the completed blocks.
        ends: (W, 1), index of the last token of the completed blocks.
    """

    rows: Tensor
    places: Tensor
    whole: Tensor
    slots: Tensor
    ends: TokenIndex


@dataclass(eq=False)
class CompressiveCache(KVCache):
    """`KVCache` whose first N' slots hold compressed blocks; it also stores the inputs of the incomplete
    block.

    Block k of an episode uses slot k mod N', with N' = `Compressive.waiting`.

    Args:
        memory: memory technique, which defines the visible tokens.
        blocks: layer of each pass.
        inputs: (L, B, c, C), inputs of the last tokens, by their offset in the block.
        input_index: (B, c), index of these tokens.
        targets: targets of the current step.
    """

    memory: "Compressive"
    blocks: Sequence[CachingLayer]
    inputs: Tensor
    input_index: TokenIndex
    targets: StepTargets | None = None

    @classmethod
    def from_state(
        cls,
        memory: "Compressive",
        blocks: Sequence[CachingLayer],
        state: State,
        capacity: int,
        tables: DistanceTables,
    ) -> "CompressiveCache":
        """Create a cache from a state.

        ``capacity`` beyond the state's length plus 1 adds slots, as room for empty slots inside episodes.
        """
        recent = state.last(min(memory.raw_length, state.index.shape[1]))
        size = memory.raw_length + 1 + max(0, capacity - state.index.shape[1] - 1)
        free_slots = size - recent.index.shape[1]
        complete, incomplete = blocks_of(state.index, memory)
        free = State.empty(
            len(blocks), len(recent.index.episode), free_slots, state.hidden, state.hidden.shape[-1]
        )
        ends = gather_index(state.index, complete.slots[..., -1])
        index = ends.concatenate(recent.index).concatenate(free.index)
        layers = [
            layer.cache(
                torch.cat([compress_blocks(layer, gather_blocks(h, complete)), r, f], dim=1), index, tables
            )
            for layer, h, r, f in zip(blocks, state.hidden, recent.hidden, free.hidden, strict=True)
        ]
        inputs = torch.stack([gather_blocks(h, incomplete)[:, 0] for h in state.hidden])
        input_index = gather_index(state.index, incomplete.slots[:, 0])
        slot = recent.index.shape[1] % size
        return cls(layers, index, slot, tables, memory, blocks, inputs, input_index)

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        return CompressedMask.of(masks, self.memory, self.memory.waiting)

    def write(self, index: TokenIndex) -> int:
        """Store the index of the next token and of the block that it completes, and return its slot."""
        first, ratio = self.memory.waiting, self.memory.ratio
        slot = first + self.slot
        self.slot = (self.slot + 1) % (self.index.shape[1] - first)
        write_index(self.index, slice(None), slot, index.at(slice(0, 1)))
        position, episode = index.position[:, 0], index.episode[:, 0]
        rows = (episode != EMPTY).nonzero()[:, 0]
        places = position[rows] % ratio
        write_index(self.input_index, rows, places, index.rows(rows))
        whole = rows[self._is_whole(position, episode)[rows]]
        slots = position[whole] // ratio % first
        self.targets = StepTargets(rows, places, whole, slots, index.rows(whole))
        write_index(self.index, whole, slots, index.rows(whole))
        return slot

    def _is_whole(self, position: Tensor, episode: Tensor) -> Tensor:
        """Return whether the token at position (B,) completes a block without missing tokens, (B,) bool."""
        ratio = self.memory.ratio
        offsets = torch.arange(1 - ratio, 1, device=position.device)
        present = self.input_index.position == position[:, None] + offsets
        present &= self.input_index.episode == episode[:, None]
        return present.all(1) & (position % ratio == ratio - 1)

    def observe_input(self, number: int, x: Tensor) -> None:
        """Store the input x (B, 1, C) of a pass and compress the blocks that it completes."""
        assert self.targets is not None
        targets, layer, ring = self.targets, self.blocks[number], self.layers[number]
        self.inputs[number, targets.rows, targets.places] = x[targets.rows, 0]
        if not len(targets.whole):
            return
        assert isinstance(ring, LayerCache)
        summaries = compress_blocks(layer, self.inputs[number, targets.whole][:, None])
        k, v = layer.prepare_keys(summaries, targets.ends)
        ring.keys[targets.whole, :, targets.slots] = k[:, :, 0]
        ring.values[targets.whole, :, targets.slots] = v[:, :, 0]

    def rows(self, rows: Tensor) -> "CompressiveCache":
        local = super().rows(rows)
        selected = replace(self, layers=local.layers, index=local.index, context=local.context)
        return replace(selected, inputs=self.inputs[:, rows], input_index=self.input_index.rows(rows))


def write_index(index: TokenIndex, rows: Tensor | slice, slots: Tensor | int, tokens: TokenIndex) -> None:
    """Write the index of tokens (R, 1) to one slot in each of the given rows, in place."""
    index.position[rows, slots] = tokens.position[:, 0]
    index.episode[rows, slots] = tokens.episode[:, 0]


def blocks_of(index: TokenIndex, memory: "Compressive") -> tuple[PositionBlocks, PositionBlocks]:
    """Return the last complete blocks of the current episode of each row, and its incomplete block.

    Complete blocks are (B, N', c) in the order of their cache slots; blocks with missing tokens are left out.
    The incomplete block is (B, 1, c).
    """
    batch, ratio, count = index.shape[0], memory.ratio, memory.waiting
    newest = last_tokens(index)
    current = (newest.position + 1).div(ratio, rounding_mode="floor")
    slots = torch.arange(count, device=current.device)
    number = current - 1 - (current - 1 - slots) % count
    offsets = torch.arange(ratio, device=current.device)
    positions = torch.cat([number, current], dim=1)[..., None] * ratio + offsets
    tokens = TokenIndex(positions.flatten(1), newest.episode.expand(batch, positions[0].numel()))
    token_slots = index.find(tokens).view_as(positions)
    absent = (newest.episode == EMPTY)[..., None] | (positions < 0)
    complete, incomplete = token_slots.masked_fill(absent, MISSING).split([count, 1], dim=1)
    lacking = (complete == MISSING).any(-1, keepdim=True)
    return PositionBlocks(complete.masked_fill(lacking, MISSING)), PositionBlocks(incomplete)


def last_tokens(index: TokenIndex) -> TokenIndex:
    """Return the index of the last token of each row, (B, 1); empty for rows without tokens."""
    slots = torch.arange(index.shape[1], device=index.episode.device)
    filled = torch.where(index.episode == EMPTY, MISSING, slots)
    last = torch.cat([torch.full_like(index.episode[:, :1], MISSING), filled], dim=1)
    return gather_index(index, last.amax(1, keepdim=True))
