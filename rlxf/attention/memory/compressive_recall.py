"""What a pass sees of a compressive memory: compressed blocks, then raw tokens, then its own."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.index import EMPTY, Index
from rlxf.attention.kernels.stretches import MISSING, Stretches
from rlxf.attention.memory.recall import Recall
from rlxf.attention.memory.reconstruction import Compressed, Content
from rlxf.attention.relation import Relation, Share

if TYPE_CHECKING:
    from rlxf.attention.memory.compressive import Compressive, LayerCompression


class CompressingLayer(Content, Protocol):
    """A layer that compresses its inputs."""

    compression: "LayerCompression"


@dataclass(frozen=True, eq=False, kw_only=True)
class CompressedRelation(Relation):
    """A `Relation` to keys of which the first stand for blocks, at whose ends they are.

    Args:
        memory: says who sees what.
        summaries: how many stand for blocks.
    """

    memory: "Compressive"
    summaries: int

    @classmethod
    def of(
        cls, relations: Sequence[Relation], memory: "Compressive", summaries: int
    ) -> "list[CompressedRelation]":
        """The same relations, but that the first keys stand for blocks; passes that share one still do."""
        made = {
            id(one): cls(
                **{field.name: getattr(one, field.name) for field in fields(Relation)},
                memory=memory,
                summaries=summaries,
            )
            for one in relations
        }
        return [made[id(one)] for one in relations]

    @cached_property
    def allowed_by_head(self) -> Tensor:
        """See `Relation`."""
        i, j = self.query.position[:, :, None], self.key.position[:, None, :]
        first = torch.arange(self.key.shape[1], device=j.device) < self.summaries
        seen = torch.where(first, self.memory.shows_summary(i, j), self.memory.shows_token(i, j))
        return super().allowed_by_head & seen[:, None]

    @property
    def shares(self) -> tuple[Share, ...] | None:
        """None: all pairs at once."""
        return None


@dataclass(frozen=True, eq=False)
class CompressiveRecall(Recall):
    """What the tokens of a segment see of a state, and of what is compressed while the segment goes on.

    Args:
        memory: says who sees what.
        layers: the layer of each pass.
    """

    memory: "Compressive"
    layers: Sequence[CompressingLayer]

    @cached_property
    def all(self) -> Index:
        """Where the tokens of state and segment stand, (B, M + T)."""
        return super().key

    @cached_property
    def blocks(self) -> Stretches:
        """Blocks of which all tokens are there, by slots of `all`; the last ones nobody sees compressed."""
        many = max(0, self.all.shape[1] - self.memory.recent - 1)
        return Stretches.of_whole_blocks(self.all.at(slice(0, many)), self.memory.ratio)

    @cached_property
    def ends(self) -> Index:
        """Where the compressed blocks stand, (B, N)."""
        return index_at(self.all, self.blocks.slots[..., -1])

    @property
    def _raw(self) -> int:
        """How many tokens of the state may be seen by themselves: the last ones."""
        return 0 if self.state is None else min(self.memory.raw, self.state.index.shape[1])

    @property
    def key(self) -> Index:
        """See `Recall`."""
        return self.ends.concatenate(self.all.last(self._raw + self.index.shape[1]))

    def related(self, relations: Sequence[Relation]) -> Sequence[Relation]:
        """See `Recall`."""
        return CompressedRelation.of(relations, self.memory, self.ends.shape[1])

    def tokens(self, number: int, x: Tensor) -> Tensor:
        """See `Recall`."""
        with torch.no_grad():
            summaries = self._summaries(number, self._blocks(number, x))
        if self.state is None:
            return summaries
        hidden = self.state.hidden[number]
        return torch.cat([summaries, hidden[:, hidden.shape[1] - self._raw :]], dim=1)

    def _blocks(self, number: int, x: Tensor) -> Tensor:
        """The tokens of the blocks, (B, N, c, C), given those of the segment, x (B, T, C)."""
        before = [] if self.state is None else [self.state.hidden[number]]
        return laid_out(torch.cat([*before, x.detach()], dim=1), self.blocks)

    def _summaries(self, number: int, blocks: Tensor) -> Tensor:
        return compressed(self.layers[number], blocks)

    def by_token(self, number: int, weights: Tensor) -> Tensor:
        """See `Recall`. The weight of a compressed block is shared evenly by its tokens."""
        slots = self.blocks.slots.flatten(1).clamp(min=0)
        of_blocks, own = weights.split([self.ends.shape[1], weights.shape[-1] - self.ends.shape[1]], dim=-1)
        own = F.pad(own, (self.all.shape[1] - own.shape[-1], 0))
        shares = (of_blocks / self.memory.ratio).repeat_interleave(self.memory.ratio, dim=-1)
        return own.scatter_add(-1, slots[:, None, None].expand_as(shares), shares)

    @property
    def learns(self) -> bool:
        """See `Recall`."""
        return any(layer.compression.reconstruction is not None for layer in self.layers)

    def penalty(self, hidden: Sequence[Tensor]) -> Tensor | None:
        """See `Recall`: that of all passes, added up."""
        found = [
            term for number, h in enumerate(hidden) if (term := self._lost(number, h.detach())) is not None
        ]
        return torch.stack(found).sum() if found else None

    def _lost(self, number: int, h: Tensor) -> Tensor | None:
        layer, blocks = self.layers[number], self._blocks(number, h)
        made = self._summaries(number, blocks)
        return layer.compression.penalty(Compressed(blocks, made, h, self._seen, layer))

    @cached_property
    def _seen(self) -> Tensor:
        """(B, T, N) bool: which blocks a token of the segment sees compressed."""
        i, end = self.index.position[:, :, None], self.ends.position[:, None, :]
        asking, there = self.index.episode[:, :, None], self.ends.episode[:, None, :]
        return (asking == there) & (there != EMPTY) & self.memory.shows_summary(i, end)


def laid_out(hidden: Tensor, blocks: Stretches) -> Tensor:
    """The tokens of hidden (B, S, C) block by block, (B, N, c, C); 0 for a block that is not there."""
    if not bool(blocks.filled.any()):
        return hidden.new_zeros(*blocks.slots.shape, hidden.shape[-1])
    return blocks.lay_out(hidden[:, None])[..., 0, :]


def index_at(index: Index, slots: Tensor) -> Index:
    """Where the tokens in slots (B, S) of an index stand; nowhere for `MISSING`."""
    if not index.shape[1]:
        return Index.empty(slots.shape[0], slots.shape[1], slots.device)
    position, episode = (x.gather(1, slots.clamp(min=0)) for x in (index.position, index.episode))
    return Index(position, episode.masked_fill(slots == MISSING, EMPTY))


def compressed(layer: CompressingLayer, blocks: Tensor) -> Tensor:
    """Blocks of tokens (B, N, c, C) -> (B, N, C)."""
    y: Tensor = layer.compression(blocks.flatten(0, 1), layer)
    return y.unflatten(0, blocks.shape[:2])
