"""Blocks of consecutive positions, and the slots of their tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.token_index import EMPTY, TokenIndex

MISSING = -1


@dataclass(frozen=True, eq=False)
class PositionBlocks:
    """N blocks of n consecutive positions in each row of a batch, each within one episode.

    Args:
        slots: (B, N, n) int64, slot of the token at each position; `MISSING` where there is none.
    """

    slots: Tensor

    @classmethod
    def of_episodes(cls, index: TokenIndex, length: int) -> "PositionBlocks":
        """Return positions 0 to length - 1 of each of ``index.episodes``; later positions must not occur."""
        episodes = index.episodes
        batch, count = episodes.shape
        number = (index.episode[..., None] == episodes[:, None]).int().argmax(-1)
        target = torch.where(index.episode == EMPTY, count * length, number * length + index.position)
        slots = episodes.new_full((batch, count * length + 1), MISSING)
        slots.scatter_(1, target, torch.arange(index.shape[1], device=episodes.device).expand(batch, -1))
        return cls(slots[:, :-1].unflatten(1, (count, length)))

    @classmethod
    def of_complete_blocks(cls, index: TokenIndex, size: int) -> "PositionBlocks":
        """Return the blocks from position c size to c size + size - 1 of an episode that have all tokens.

        Rows with fewer blocks than others are padded with blocks without tokens.
        """
        tokens = torch.where(index.episode == EMPTY, -1, (index.episode << 32) + index.position)
        tokens, order = tokens.sort(dim=1)
        first, last = tokens[:, : max(0, tokens.shape[1] - size + 1)], tokens[:, size - 1 :]
        complete = (first >= 0) & ((first & 0xFFFFFFFF) % size == 0) & (last == first + size - 1)
        count = int(complete.sum(1).max()) if complete.numel() else 0
        starts = (~complete).sort(dim=1, stable=True).indices[:, :count]
        inside = starts[..., None] + torch.arange(size, device=starts.device)
        slots = order.gather(1, inside.flatten(1)).view_as(inside)
        return cls(slots.masked_fill(~complete.gather(1, starts)[..., None], MISSING))

    @property
    def filled(self) -> Tensor:
        """Mask of positions that have a token, (B, N, n) bool."""
        return self.slots != MISSING

    def gather(self, x: Tensor) -> Tensor:
        """Arrange x (B, H, S, D) by position: (B, N, n, H, D), 0 where there is no token."""
        (batch, count, length), slots = self.slots.shape, self.slots.flatten(1)
        rows, start = x.transpose(1, 2), int(slots[0, 0])
        consecutive = torch.arange(start, start + slots.shape[1], device=slots.device)
        if start != MISSING and bool((slots == consecutive).all()):
            return rows[:, start : start + slots.shape[1]].unflatten(1, (count, length))
        offset = torch.arange(batch, device=slots.device)[:, None] * rows.shape[1]
        picked = F.embedding(slots.clamp(min=0) + offset, rows.flatten(0, 1).flatten(1))
        picked = picked.masked_fill((slots == MISSING)[..., None], 0.0)
        return picked.unflatten(1, (count, length)).unflatten(-1, rows.shape[2:])

    def fully_visible(self, allowed: Tensor) -> Tensor:
        """Return the blocks of which a query may see every token, for blocks without missing tokens.

        allowed (B, h, Tq, S) bool -> (B, h, Tq, N) bool.
        """
        shape = (*allowed.shape[:3], self.slots[0].numel())
        slots = self.slots.clamp(min=0).flatten(1)[:, None, None].expand(shape)
        seen = allowed.gather(-1, slots).unflatten(-1, self.slots.shape[1:]).all(-1)
        return seen & self.filled[:, None, None, :, 0]

    def spread(self, of_blocks: Tensor, tokens: int) -> Tensor:
        """Expand a mask of blocks (B, h, Tq, N) to the S tokens of a row; False for tokens in no block."""
        batch, count, length = self.slots.shape
        slots = torch.where(self.filled, self.slots, tokens).flatten(1)
        number = torch.arange(count, device=slots.device).repeat_interleave(length).expand(batch, -1)
        of_token = slots.new_full((batch, tokens + 1), count).scatter_(1, slots, number)[:, :-1]
        shape = (*of_blocks.shape[:3], tokens)
        return F.pad(of_blocks, (0, 1)).gather(-1, of_token[:, None, None].expand(shape))
