"""Stretches of positions, and the slots in which their tokens stand."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.index import EMPTY, Index

MISSING = -1


@dataclass(frozen=True, eq=False)
class Stretches:
    """N stretches of n positions in each row of a batch, each of them within one episode.

    Args:
        slots: (B, N, n) int64, where the token of each position stands; `MISSING` for nowhere.
    """

    slots: Tensor

    @classmethod
    def of_episodes(cls, index: Index, length: int) -> "Stretches":
        """Positions 0 to length - 1 of each of ``index.episodes``; no token may stand beyond."""
        names = index.episodes
        batch, count = names.shape
        number = (index.episode[..., None] == names[:, None]).int().argmax(-1)
        place = torch.where(index.episode == EMPTY, count * length, number * length + index.position)
        slots = names.new_full((batch, count * length + 1), MISSING)
        slots.scatter_(1, place, torch.arange(index.shape[1], device=names.device).expand(batch, -1))
        return cls(slots[:, :-1].unflatten(1, (count, length)))

    @classmethod
    def of_whole_blocks(cls, index: Index, size: int) -> "Stretches":
        """Positions c size to c size + size - 1 of an episode, wherever there is a token at all of them.

        Rows with fewer of them than others have some without tokens.
        """
        tokens = torch.where(index.episode == EMPTY, -1, (index.episode << 32) + index.position)
        tokens, order = tokens.sort(dim=1)
        first, last = tokens[:, : max(0, tokens.shape[1] - size + 1)], tokens[:, size - 1 :]
        whole = (first >= 0) & ((first & 0xFFFFFFFF) % size == 0) & (last == first + size - 1)
        count = int(whole.sum(1).max()) if whole.numel() else 0
        begin = (~whole).sort(dim=1, stable=True).indices[:, :count]
        inside = begin[..., None] + torch.arange(size, device=begin.device)
        slots = order.gather(1, inside.flatten(1)).view_as(inside)
        return cls(slots.masked_fill(~whole.gather(1, begin)[..., None], MISSING))

    @property
    def filled(self) -> Tensor:
        """(B, N, n) bool: whether a position has a token."""
        return self.slots != MISSING

    def lay_out(self, x: Tensor) -> Tensor:
        """x (B, H, S, D) by position, 0 where there is no token: (B, N, n, H, D)."""
        (batch, count, length), slots = self.slots.shape, self.slots.flatten(1)
        rows, start = x.transpose(1, 2), int(slots[0, 0])
        run = torch.arange(start, start + slots.shape[1], device=slots.device)
        if start != MISSING and bool((slots == run).all()):
            return rows[:, start : start + slots.shape[1]].unflatten(1, (count, length))
        offset = torch.arange(batch, device=slots.device)[:, None] * rows.shape[1]
        picked = F.embedding(slots.clamp(min=0) + offset, rows.flatten(0, 1).flatten(1))
        picked = picked.masked_fill((slots == MISSING)[..., None], 0.0)
        return picked.unflatten(1, (count, length)).unflatten(-1, rows.shape[2:])

    def seen_by(self, allowed: Tensor) -> Tensor:
        """Of whole blocks, those of which a query may see each token.

        allowed (B, h, Tq, S) bool -> (B, h, Tq, N) bool.
        """
        shape = (*allowed.shape[:3], self.slots[0].numel())
        slots = self.slots.clamp(min=0).flatten(1)[:, None, None].expand(shape)
        seen = allowed.gather(-1, slots).unflatten(-1, self.slots.shape[1:]).all(-1)
        return seen & self.filled[:, None, None, :, 0]

    def spread(self, of_stretches: Tensor, tokens: int) -> Tensor:
        """What holds for stretches, (B, h, Tq, N) bool, for each of S tokens; False for those in none."""
        batch, count, length = self.slots.shape
        slots = torch.where(self.filled, self.slots, tokens).flatten(1)
        number = torch.arange(count, device=slots.device).repeat_interleave(length).expand(batch, -1)
        of_token = slots.new_full((batch, tokens + 1), count).scatter_(1, slots, number)[:, :-1]
        shape = (*of_stretches.shape[:3], tokens)
        return F.pad(of_stretches, (0, 1)).gather(-1, of_token[:, None, None].expand(shape))
