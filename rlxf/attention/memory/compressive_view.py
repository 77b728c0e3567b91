"""View of a compressive memory for a segment: compressed blocks, raw tokens, then the segment's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.position_blocks import MISSING, PositionBlocks
from rlxf.attention.memory.base import MemoryView
from rlxf.attention.memory.compression import ContentLayer, ReconstructionInput
from rlxf.attention.token_index import EMPTY, TokenIndex

if TYPE_CHECKING:
    from rlxf.attention.memory.compressive import Compressive, LayerCompression


class CompressingLayer(ContentLayer, Protocol):
    """Interface of a layer that compresses its inputs."""

    compression: "LayerCompression"


@dataclass(frozen=True, eq=False, kw_only=True)
class CompressedMask(AttentionMask):
    """`AttentionMask` whose first keys are compressed blocks, indexed by their last position.

    Args:
        memory: memory technique, which defines the visible tokens.
        summaries: number of keys that are compressed blocks.
    """

    memory: "Compressive"
    summaries: int

    @classmethod
    def of(
        cls, masks: Sequence[AttentionMask], memory: "Compressive", summaries: int
    ) -> "list[CompressedMask]":
        """Convert masks to ones whose first keys are compressed blocks; shared objects stay shared."""
        converted = {
            id(mask): cls(
                **{field.name: getattr(mask, field.name) for field in fields(AttentionMask)},
                memory=memory,
                summaries=summaries,
            )
            for mask in masks
        }
        return [converted[id(mask)] for mask in masks]

    @cached_property
    def allowed_by_head(self) -> Tensor:
        i, j = self.query.position[:, :, None], self.key.position[:, None, :]
        is_block = torch.arange(self.key.shape[1], device=j.device) < self.summaries
        visible = torch.where(is_block, self.memory.sees_compressed(i, j), self.memory.sees_raw(i, j))
        return super().allowed_by_head & visible[:, None]

    @property
    def sparse_plan(self) -> None:
        """None: attention is always dense."""
        return None


@dataclass(frozen=True, eq=False)
class CompressiveView(MemoryView):
    """View of a compressive memory for a segment, including blocks that are compressed within the segment.

    Args:
        memory: memory technique, which defines the visible tokens.
        layers: layer of each pass.
    """

    memory: "Compressive"
    layers: Sequence[CompressingLayer]

    @cached_property
    def all(self) -> TokenIndex:
        """Index of the tokens of state and segment, (B, M + T)."""
        return super().key

    @cached_property
    def blocks(self) -> PositionBlocks:
        """Complete blocks, as slots of `all`. The last tokens are skipped: no query sees them compressed."""
        count = max(0, self.all.shape[1] - self.memory.recent - 1)
        return PositionBlocks.of_complete_blocks(self.all.at(slice(0, count)), self.memory.ratio)

    @cached_property
    def ends(self) -> TokenIndex:
        """Index of the last token of each compressed block, (B, N)."""
        return gather_index(self.all, self.blocks.slots[..., -1])

    @property
    def _raw(self) -> int:
        """Number of the state's last tokens that may be visible raw."""
        return 0 if self.state is None else min(self.memory.raw_length, self.state.index.shape[1])

    @property
    def key(self) -> TokenIndex:
        return self.ends.concatenate(self.all.last(self._raw + self.index.shape[1]))

    def adapt_masks(self, masks: Sequence[AttentionMask]) -> Sequence[AttentionMask]:
        return CompressedMask.of(masks, self.memory, self.ends.shape[1])

    def tokens(self, number: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            summaries = self._summaries(number, self._blocks(number, x))
        if self.state is None:
            return summaries
        hidden = self.state.hidden[number]
        return torch.cat([summaries, hidden[:, hidden.shape[1] - self._raw :]], dim=1)

    def _blocks(self, number: int, x: Tensor) -> Tensor:
        """Return the tokens of the blocks, (B, N, c, C), given the segment's inputs x (B, T, C) of a pass."""
        memory = [] if self.state is None else [self.state.hidden[number]]
        return gather_blocks(torch.cat([*memory, x.detach()], dim=1), self.blocks)

    def _summaries(self, number: int, blocks: Tensor) -> Tensor:
        return compress_blocks(self.layers[number], blocks)

    def weights_by_token(self, number: int, weights: Tensor) -> Tensor:
        """Convert weights over keys to weights over tokens; a block's weight is split evenly."""
        slots = self.blocks.slots.flatten(1).clamp(min=0)
        count = self.ends.shape[1]
        block_weights, raw_weights = weights.split([count, weights.shape[-1] - count], dim=-1)
        raw_weights = F.pad(raw_weights, (self.all.shape[1] - raw_weights.shape[-1], 0))
        token_weights = (block_weights / self.memory.ratio).repeat_interleave(self.memory.ratio, dim=-1)
        return raw_weights.scatter_add(-1, slots[:, None, None].expand_as(token_weights), token_weights)

    @property
    def has_penalty(self) -> bool:
        return any(layer.compression.reconstruction is not None for layer in self.layers)

    def penalty(self, hidden: Sequence[Tensor]) -> Tensor | None:
        """Return the auxiliary loss, summed over passes."""
        terms = [
            term
            for number, h in enumerate(hidden)
            if (term := self._pass_penalty(number, h.detach())) is not None
        ]
        return torch.stack(terms).sum() if terms else None

    def _pass_penalty(self, number: int, h: Tensor) -> Tensor | None:
        layer, blocks = self.layers[number], self._blocks(number, h)
        summaries = self._summaries(number, blocks)
        return layer.compression.penalty(ReconstructionInput(blocks, summaries, h, self._mask, layer))

    @cached_property
    def _mask(self) -> Tensor:
        """Mask (B, T, N) bool: True where a token of the segment sees a block compressed."""
        i, end = self.index.position[:, :, None], self.ends.position[:, None, :]
        query_episode, block_episode = self.index.episode[:, :, None], self.ends.episode[:, None, :]
        same = (query_episode == block_episode) & (block_episode != EMPTY)
        return same & self.memory.sees_compressed(i, end)


def gather_blocks(hidden: Tensor, blocks: PositionBlocks) -> Tensor:
    """Gather the tokens of hidden (B, S, C) by block, (B, N, c, C); 0 for missing blocks."""
    if not bool(blocks.filled.any()):
        return hidden.new_zeros(*blocks.slots.shape, hidden.shape[-1])
    return blocks.gather(hidden[:, None])[..., 0, :]


def gather_index(index: TokenIndex, slots: Tensor) -> TokenIndex:
    """Return the index of the tokens in slots (B, S); empty for `MISSING`."""
    if not index.shape[1]:
        return TokenIndex.empty(slots.shape[0], slots.shape[1], slots.device)
    position, episode = (x.gather(1, slots.clamp(min=0)) for x in (index.position, index.episode))
    return TokenIndex(position, episode.masked_fill(slots == MISSING, EMPTY))


def compress_blocks(layer: CompressingLayer, blocks: Tensor) -> Tensor:
    """Compress blocks of tokens (B, N, c, C) -> (B, N, C)."""
    y: Tensor = layer.compression(blocks.flatten(0, 1), layer)
    return y.unflatten(0, blocks.shape[:2])
