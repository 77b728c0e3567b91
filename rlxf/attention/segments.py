"""Segments of episodes, the memory tokens that are passed between them, their masks and their cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.cache import KVCache
from rlxf.attention.recurrent.base import EpisodeRuns, RecurrentState
from rlxf.attention.token_index import EMPTY, MISSING, TokenIndex


@dataclass(frozen=True, eq=False)
class EpisodeSegments:
    """Tokens of a call, divided into the segments of their episodes; rows are divided independently.

    Args:
        slots: for each part, (B, W) int64, slots of its tokens; `MISSING` where a row has none.
        offsets: for each part, the offset in the segment of its first column.
        part: (B, T) int64, number of the part of each token.
        offset: (B, T) int64, offset of each token in its segment.
    """

    slots: list[Tensor]
    offsets: list[int]
    part: Tensor
    offset: Tensor

    @classmethod
    def of(cls, index: TokenIndex, before: TokenIndex, size: int) -> "EpisodeSegments":
        """Divide the tokens at ``index`` (B, T), which follow the token at ``before`` (B, 1)."""
        key, last = segment_keys(index, size), segment_keys(before, size)[:, 0]
        runs = EpisodeRuns.of(TokenIndex(index.position, key), last)
        offset = index.position % size
        token = torch.arange(index.shape[1], device=key.device).expand_as(key)
        slots, offsets = [], []
        for number in range(int(runs.number.max()) + 1):
            place = torch.where(runs.valid & (runs.number == number), offset, size)
            filled = token.new_full((len(key), size + 1), MISSING).scatter(1, place, token)[:, :-1]
            used = (filled != MISSING).any(0).nonzero()
            first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
            slots.append(filled[:, first:end])
            offsets.append(first)
        return cls(slots, offsets, runs.number, offset)

    @property
    def used(self) -> list[int]:
        """Numbers of the parts that are processed: those with tokens in any row, and the last one."""
        last = len(self.slots) - 1
        return [number for number, slots in enumerate(self.slots) if slots.shape[1] or number == last]

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """Return values of all tokens, (B, T, F), given those of each part, (B, W, F)."""
        widths = [x.shape[1] for x in self.slots]
        starts = torch.tensor([sum(widths[:n]) - first for n, first in enumerate(self.offsets)])
        column = starts.to(self.offset.device)[self.part] + self.offset
        values = F.pad(torch.cat(list(parts), dim=1), (0, 0, 0, 1))  # not empty even without tokens
        column = column.clamp(0, values.shape[1] - 1)[..., None]
        return values.gather(1, column.expand(-1, -1, values.shape[-1]))


def segment_keys(index: TokenIndex, size: int) -> Tensor:
    """Return a number for episode and segment of each token, (B, T) int64; `EMPTY` for empty slots."""
    segment = index.position.div(size, rounding_mode="floor")
    return torch.where(index.episode == EMPTY, EMPTY, (index.episode << 32) + segment)


@dataclass(frozen=True, eq=False)
class Memories:
    """Memory tokens of B rows.

    Args:
        tokens: (B, m, C), the memory tokens; arbitrary where not ``written``.
        written: (B,) bool, whether a segment of the episode has written them.
        last: (B, 1), index of the last token.
    """

    tokens: Tensor
    written: Tensor
    last: TokenIndex

    @classmethod
    def of(cls, state: RecurrentState) -> "Memories":
        """Return the memory of a state."""
        memory, episode = state.memory, state.episode
        last = TokenIndex(memory["position"][:, None], episode[:, None])
        return cls(memory["tokens"], memory["written"], last)

    def read(self, start: Tensor) -> Tensor:
        """Return the memory tokens (B, m, C), given the learned ones (m, C) of a new episode."""
        return torch.where(self.written[:, None, None], self.tokens, start.to(self.tokens.dtype))

    def at(self, index: TokenIndex) -> "Memories":
        """Return the memory before the tokens (B, 1): empty in a new episode."""
        here = index.episode != EMPTY
        same = (index.episode == self.last.episode)[:, 0]
        position, episode = (
            torch.where(here, new, old)
            for new, old in ((index.position, self.last.position), (index.episode, self.last.episode))
        )
        return Memories(self.tokens, self.written & (same | ~here[:, 0]), TokenIndex(position, episode))

    def write(self, rows: Tensor, tokens: Tensor) -> "Memories":
        """Replace the tokens of rows (B,) bool."""
        tokens = torch.where(rows[:, None, None], tokens.to(self.tokens.dtype), self.tokens)
        return replace(self, tokens=tokens, written=self.written | rows)

    def state(self, before: RecurrentState) -> RecurrentState:
        """Return the recurrent state, without gradient, given any other state of the same transformer."""
        tokens = self.tokens.detach()
        position = self.last.position[:, 0]
        memory = {"tokens": tokens, "written": self.written, "position": position}
        return replace(before, episode=self.last.episode[:, 0], memory=memory)


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenGroupMask(AttentionMask):
    """`AttentionMask` in which read tokens attend to each other, and so do write tokens.

    Args:
        first: number of read tokens, at positions from 0.
        last: position of the first write token.
    """

    first: int
    last: int

    @cached_property
    def allowed_by_head(self) -> Tensor:
        i, j = self.query.position[:, :, None], self.key.position[:, None, :]
        filled = (self.query.episode != EMPTY)[:, :, None] & (self.key.episode != EMPTY)[:, None, :]
        group = ((i < self.first) & (j < self.first)) | ((i >= self.last) & (j >= self.last))
        return super().allowed_by_head | (group & filled)[:, None]

    @property
    def hides_future(self) -> bool:
        """False: read tokens attend to later ones, and so do write tokens."""
        return False

    @property
    def sparse_plan(self) -> None:
        """None: attention is always dense."""
        return None


@dataclass(eq=False)
class SegmentedCache(KVCache):
    """`KVCache` of one segment: the memory tokens, then a ring buffer of its tokens, with local positions.

    Args:
        count: number of memory tokens m.
        memories: the memory tokens.
        inputs: (L, B, S, C), inputs of the segment's tokens by offset, which the write tokens read.
        filled: (B, S) bool, offsets that have a token.
    """

    count: int
    memories: Memories
    inputs: Tensor
    filled: Tensor

    @property
    def fixed_slots(self) -> int:
        return self.count

    def clear(self, rows: Tensor) -> None:
        """Remove the segment's tokens of rows (R,)."""
        self.index.episode[rows, self.count :] = EMPTY
        self.filled[rows] = False

    def add(self, rows: Tensor, offset: Tensor, hidden: Tensor) -> None:
        """Store the inputs hidden (L, B, C) of rows (B,) bool at an offset (B,)."""
        chosen = rows.nonzero()[:, 0]
        self.inputs[:, chosen, offset[chosen]] = hidden[:, chosen]
        self.filled[chosen, offset[chosen]] = True

    def rows(self, rows: Tensor) -> Self:
        copy = super().rows(rows)
        chosen = rows.nonzero()[:, 0] if rows.dtype is torch.bool else rows
        last = self.memories.last.rows(chosen)
        memories = Memories(self.memories.tokens[chosen], self.memories.written[chosen], last)
        return replace(copy, memories=memories, inputs=self.inputs[:, chosen], filled=self.filled[chosen])
