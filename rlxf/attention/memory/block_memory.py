"""Memory with raw recent tokens and compressed blocks of older ones: visibility, view and cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention import LayerCache
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cache import KVCache
from rlxf.attention.memory.base import Memory, MemoryView, State, extend_masks
from rlxf.attention.memory.compression import ContentLayer, LayerCompression, ReconstructionInput
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.relative import DistanceTables
from rlxf.attention.token_index import EMPTY, MISSING, PositionBlocks, TokenIndex, selected_rows


class BlockMemory(Memory):
    """Memory in which each block of c = ``ratio`` tokens older than M = ``recent`` tokens is one key.

    N = ``compressed`` blocks are visible. Visibility depends on positions only. A token is visible either raw
    or compressed. See `Compressive`.
    """

    recent: int
    compressed: int
    ratio: int

    @property
    def length(self) -> int:
        """Tokens in a state, M + N c + c - 1: they contain all blocks that are visible to the next token."""
        return self.max_distance + self.ratio - 1

    @property
    def max_distance(self) -> int:
        """Maximum distance, in tokens, to the end of a visible block: M + N c."""
        return self.recent + self.compressed * self.ratio

    @property
    def raw_length(self) -> int:
        """Maximum number of earlier tokens that are visible raw: M + c - 1."""
        return self.recent + self.ratio - 1

    @property
    def cached_blocks(self) -> int:
        """Number of compressed blocks in a cache: the visible ones, and those that will become visible."""
        return self.compressed + self.recent // self.ratio + 1

    def visible_pattern(self, pattern: Pattern) -> Pattern:
        return BlockWindow(self.max_distance, self.ratio)

    def is_raw_visible(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether the token at position j <= i is visible from position i without compression."""
        return BlockWindow(self.recent, self.ratio).mask_mod(i, j)

    def is_compressed_visible(self, i: Tensor, end: Tensor) -> Tensor:
        """Return whether position i attends to the compressed block that ends at position ``end``."""
        return (i - end > self.recent) & (i - end <= self.max_distance)

    def step_distance(self, capacity: int, pattern: Pattern) -> int:
        return self.max_distance

    def view(self, state: State | None, index: TokenIndex, layers: Sequence[Any]) -> "BlockView":
        return BlockView(state, index, self, layers)

    def cache(
        self, state: State, capacity: int, layers: Sequence[Any], tables: DistanceTables
    ) -> "BlockCache":
        """Create the KV cache for acting from a state; see `Memory.cache`.

        ``capacity`` beyond the state's length plus 1 adds slots, as room for empty slots inside episodes.
        """
        recent = state.last(self.raw_length)
        size = self.raw_length + 1 + max(0, capacity - state.index.shape[1] - 1)
        slot = recent.index.shape[1] % size
        raw = recent.padded(size)
        complete, incomplete = _blocks_of(state.index, self)
        index = state.index.gather(complete.slots[..., -1]).concatenate(raw.index)
        caches = []
        for layer, h, r in zip(layers, state.hidden, raw.hidden, strict=True):
            summaries = layer.compression(_gather(h, complete), layer)
            caches.append(layer.cache(torch.cat([summaries, r], dim=1), index, tables))
        inputs = torch.stack([_gather(h, incomplete)[:, 0] for h in state.hidden])
        input_index = state.index.gather(incomplete.slots[:, 0])
        return BlockCache(caches, index, slot, tables, self, layers, inputs, input_index)


@dataclass(frozen=True)
class BlockWindow(Pattern):
    """Pattern of the tokens whose block of ``size`` ends at most ``farthest`` positions before the query."""

    farthest: int
    size: int

    @property
    def max_distance(self) -> int:
        """Maximum distance, to the first token of the farthest block."""
        return self.farthest + self.size - 1

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        end = j.div(self.size, rounding_mode="floor") * self.size + self.size - 1
        return i - end <= self.farthest


class CompressingLayer(ContentLayer, Protocol):
    """Interface of a layer that compresses its inputs and has a KV cache."""

    compression: LayerCompression

    def prepare_keys(self, x: Tensor, index: TokenIndex) -> tuple[Tensor, Tensor]:
        """Return position-encoded keys and values (B, H, S, D) of tokens x (B, S, C) at an index (B, S)."""
        ...

    def cache(self, memory: Tensor, index: TokenIndex, tables: DistanceTables) -> LayerCache:
        """Create the KV cache of the memory tokens (B, S, C)."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockMask(AttentionMask):
    """`AttentionMask` whose first keys are compressed blocks, indexed by their last position.

    Args:
        memory: memory technique, which defines the visible tokens.
        summaries: number of keys that are compressed blocks.
    """

    memory: BlockMemory
    summaries: int

    @cached_property
    def allowed_by_head(self) -> Tensor:
        i, j = self.query.position[:, :, None], self.key.position[:, None, :]
        blocks, tokens = j[..., : self.summaries], j[..., self.summaries :]
        visible = self.memory.is_compressed_visible(i, blocks), self.memory.is_raw_visible(i, tokens)
        return super().allowed_by_head & torch.cat(visible, dim=-1)[:, None]

    @property
    def sparse_plan(self) -> None:
        """None: attention is always dense."""
        return None


@dataclass(frozen=True, eq=False)
class BlockView(MemoryView):
    """View of a block memory for a segment: compressed blocks, raw tokens, then the segment's tokens.

    It includes blocks that are compressed within the segment.

    Args:
        memory: memory technique, which defines the visible tokens.
        layers: layer of each pass.
    """

    memory: BlockMemory
    layers: Sequence[CompressingLayer]

    @cached_property
    def token_index(self) -> TokenIndex:
        """Index of the S tokens of the state and the T of the segment, (B, S + T)."""
        return super().key

    @cached_property
    def blocks(self) -> PositionBlocks:
        """Complete blocks, as slots of `token_index`.

        The last tokens are skipped: no query attends to them in compressed form.
        """
        count = max(0, self.token_index.shape[1] - self.memory.recent - 1)
        return PositionBlocks.of_complete_blocks(self.token_index.at(slice(0, count)), self.memory.ratio)

    @cached_property
    def ends(self) -> TokenIndex:
        """Index of the last token of each compressed block, (B, N)."""
        return self.token_index.gather(self.blocks.slots[..., -1])

    @property
    def _raw(self) -> int:
        """Number of the state's last tokens that may be visible raw."""
        return 0 if self.state is None else min(self.memory.raw_length, self.state.index.shape[1])

    @property
    def key(self) -> TokenIndex:
        return self.ends.concatenate(self.token_index.last(self._raw + self.index.shape[1]))

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        return extend_masks(BlockMask, masks, memory=self.memory, summaries=self.ends.shape[1])

    def tokens(self, pass_index: int, x: Tensor) -> Tensor:
        layer = self.layers[pass_index]
        with torch.no_grad():
            summaries = layer.compression(self._blocks(pass_index, x), layer)
        if self.state is None:
            return summaries
        hidden = self.state.hidden[pass_index]
        return torch.cat([summaries, hidden[:, hidden.shape[1] - self._raw :]], dim=1)

    def _blocks(self, pass_index: int, x: Tensor) -> Tensor:
        """Return the tokens of the blocks, (B, N, c, C), given the segment's inputs x (B, T, C) of a pass."""
        memory = [] if self.state is None else [self.state.hidden[pass_index]]
        return _gather(torch.cat([*memory, x.detach()], dim=1), self.blocks)

    def weights_by_token(self, pass_index: int, weights: Tensor) -> Tensor:
        """Convert weights over keys to weights over tokens; a block's weight is split evenly."""
        slots = self.blocks.slots.flatten(1).clamp(min=0)
        count = self.ends.shape[1]
        block_weights, raw_weights = weights.split([count, weights.shape[-1] - count], dim=-1)
        raw_weights = F.pad(raw_weights, (self.token_index.shape[1] - raw_weights.shape[-1], 0))
        token_weights = (block_weights / self.memory.ratio).repeat_interleave(self.memory.ratio, dim=-1)
        return raw_weights.scatter_add(-1, slots[:, None, None].expand_as(token_weights), token_weights)

    @property
    def has_penalty(self) -> bool:
        return any(layer.compression.reconstruction is not None for layer in self.layers)

    def penalty(self, hidden: Sequence[Tensor]) -> Tensor | None:
        """Return the auxiliary loss, summed over passes."""
        terms = [self._pass_penalty(number, h.detach()) for number, h in enumerate(hidden)]
        present = [term for term in terms if term is not None]
        return torch.stack(present).sum() if present else None

    def _pass_penalty(self, pass_index: int, h: Tensor) -> Tensor | None:
        layer = self.layers[pass_index]
        blocks = self._blocks(pass_index, h)
        summaries = layer.compression(blocks, layer)
        return layer.compression.penalty(ReconstructionInput(blocks, summaries, h, self._mask, layer))

    @cached_property
    def _mask(self) -> Tensor:
        """Mask (B, T, N) bool: True where a token of the segment attends to a compressed block."""
        i, end = self.index.position[:, :, None], self.ends.position[:, None, :]
        return self.index.shares_episode(self.ends) & self.memory.is_compressed_visible(i, end)


@dataclass(frozen=True, eq=False)
class WritePlan:
    """Places where the inputs of one step are stored.

    Args:
        rows: (R,) int64, rows that have a token in this step.
        places: (R,) int64, offset of the token in its block, from 0.
        completed: (W,) int64, rows whose token completes a block.
        slots: (W,) int64, cache slots of the completed blocks.
        ends: (W, 1), index of the last token of the completed blocks.
    """

    rows: Tensor
    places: Tensor
    completed: Tensor
    slots: Tensor
    ends: TokenIndex


@dataclass(eq=False)
class BlockCache(KVCache):
    """`KVCache` whose first N' slots hold compressed blocks; it also stores the inputs of the last block.

    Block k of an episode uses slot k mod N', with N' = `BlockMemory.cached_blocks`.

    Args:
        memory: memory technique, which defines the visible tokens.
        layer_modules: layer of each pass.
        inputs: (L, B, c, C), inputs of the last tokens, by their offset in the block.
        input_index: (B, c), index of these tokens.
        plan: where the inputs of the current step are stored.
    """

    memory: BlockMemory
    layer_modules: Sequence[CompressingLayer]
    inputs: Tensor
    input_index: TokenIndex
    plan: WritePlan | None = None

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        return extend_masks(BlockMask, masks, memory=self.memory, summaries=self.fixed_slots)

    @property
    def fixed_slots(self) -> int:
        return self.memory.cached_blocks

    def write(self, index: TokenIndex) -> int:
        """Store the index of the next token and of the block that it completes, and return its slot.

        While tracing, every token counts as one that completes a block. If it does not, the block is written
        to the token's own slot of the ring buffer, which the token overwrites.
        """
        slot = super().write(index)
        ratio = self.memory.ratio
        position, episode = index.position[:, 0], index.episode[:, 0]
        rows = selected_rows(episode != EMPTY)
        places = position[rows] % ratio
        self.input_index.write(rows, places, index.rows(rows))
        completes = self._completes_block(position, episode) & (episode != EMPTY)
        completed = selected_rows(completes)
        slots = torch.where(completes, position // ratio % self.fixed_slots, slot)[completed]
        self.plan = WritePlan(rows, places, completed, slots, index.rows(completed))
        self.index.write(completed, self.plan.slots, self.plan.ends)
        return slot

    def _completes_block(self, position: Tensor, episode: Tensor) -> Tensor:
        """Return whether the token at position (B,) completes a block without missing tokens, (B,) bool."""
        ratio = self.memory.ratio
        offsets = torch.arange(1 - ratio, 1, device=position.device)
        present = self.input_index.position == position[:, None] + offsets
        present &= self.input_index.episode == episode[:, None]
        return present.all(1) & (position % ratio == ratio - 1)

    def observe_input(self, pass_index: int, x: Tensor) -> None:
        """Store the input x (B, 1, C) of a pass and compress the blocks that it completes."""
        assert self.plan is not None
        plan = self.plan
        layer = self.layer_modules[pass_index]
        ring = self.layers[pass_index]
        self.inputs[pass_index, plan.rows, plan.places] = x[plan.rows, 0]
        if not len(plan.completed):
            return
        assert isinstance(ring, LayerCache)
        summaries = layer.compression(self.inputs[pass_index, plan.completed][:, None], layer)
        k, v = layer.prepare_keys(summaries, plan.ends)
        ring.write_rows(plan.completed, plan.slots, k, v)

    def rows(self, rows: Tensor) -> "BlockCache":
        inputs, input_index = self.inputs[:, rows], self.input_index.rows(rows)
        return replace(super().rows(rows), inputs=inputs, input_index=input_index)


def _gather(hidden: Tensor, blocks: PositionBlocks) -> Tensor:
    """Gather the tokens of hidden (B, S, C) by block, (B, N, c, C); 0 for missing blocks."""
    if not bool(blocks.filled.any()):
        return hidden.new_zeros(*blocks.slots.shape, hidden.shape[-1])
    return blocks.gather(hidden[:, None])[..., 0, :]


def _blocks_of(index: TokenIndex, memory: BlockMemory) -> tuple[PositionBlocks, PositionBlocks]:
    """Return the last complete blocks of the current episode of each row, and its incomplete block.

    Complete blocks are (B, N', c) in the order of their cache slots; blocks with missing tokens are left out.
    The incomplete block is (B, 1, c).
    """
    batch = index.shape[0]
    ratio = memory.ratio
    count = memory.cached_blocks
    newest = index.newest()
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
