"""Position and episode of each token."""

from dataclasses import dataclass

import torch
from torch import Tensor

EMPTY = -1
"""Episode number of a slot that holds no token."""


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Position and episode of every token of a batch.

    Tokens attend only to tokens of their own episode. Episode numbers are local to a row of
    the batch. A slot with episode -1 is empty: no token attends to it and its output is 0.

    Args:
        position: (B, T) int64, steps since the start of the episode, from 0.
        episode: (B, T) int64, episode number, -1 for an empty slot.

    Raises:
        ValueError: if the two shapes differ or are not (B, T).
    """

    position: Tensor
    episode: Tensor

    def __post_init__(self) -> None:
        if self.position.dim() != 2 or self.position.shape != self.episode.shape:
            shapes = f"{tuple(self.position.shape)} and {tuple(self.episode.shape)}"
            raise ValueError(f"position and episode must both have shape (B, T), got {shapes}")

    @classmethod
    def range(
        cls, batch: int, length: int, start: int = 0, device: torch.device | None = None
    ) -> "TokenIndex":
        """Create an index with one episode per row and positions start ... start + length - 1."""
        position = torch.arange(start, start + length, device=device).expand(batch, length)
        return cls(position, torch.zeros_like(position))

    @classmethod
    def empty(cls, batch: int, length: int, device: torch.device | None = None) -> "TokenIndex":
        """Create an index that has only empty slots."""
        position = torch.zeros(batch, length, dtype=torch.long, device=device)
        return cls(position, torch.full_like(position, EMPTY))

    @property
    def shape(self) -> torch.Size:
        """Shape (B, T)."""
        return self.position.shape

    @property
    def contiguous(self) -> bool:
        """Return whether each episode occupies contiguous slots with positions that increase by 1.

        Episode numbers must also increase from slot to slot.
        """
        episode, position = self.episode, self.position
        previous, current = episode[:, :-1], episode[:, 1:]
        continues = (current == previous) & (position[:, 1:] == position[:, :-1] + 1)
        starts = current > previous.cummax(dim=1).values
        return bool((continues | starts | (current == EMPTY)).all())

    @property
    def episodes(self) -> Tensor:
        """Distinct episode numbers of each row, ascending: (B, N), padded with `EMPTY`; N is at least 1."""
        ordered = self.episode.sort(dim=1).values
        is_new = (ordered != EMPTY) & (ordered.diff(dim=1, prepend=ordered[:, :1] - 1) != 0)
        count = max(1, int(is_new.sum(1).max()))
        first = (~is_new).sort(dim=1, stable=True).indices[:, :count]
        return torch.where(is_new, ordered, EMPTY).gather(1, first)

    def find(self, tokens: "TokenIndex") -> Tensor:
        """Return the slot (B, N) of each of the tokens (B, N) in its row of this index; -1 if missing."""
        keys, targets = ((one.episode << 32) + one.position for one in (self, tokens))
        if not keys.shape[1]:
            return torch.full_like(targets, -1)
        keys, order = keys.sort(dim=1)
        rank = torch.searchsorted(keys, targets.contiguous()).clamp(max=keys.shape[1] - 1)
        return torch.where(keys.gather(1, rank) == targets, order.gather(1, rank), -1)

    def concatenate(self, later: "TokenIndex") -> "TokenIndex":
        """Concatenate this index and ``later`` along time."""
        position = torch.cat([self.position, later.position], dim=1)
        return TokenIndex(position, torch.cat([self.episode, later.episode], dim=1))

    def rows(self, rows: Tensor | slice) -> "TokenIndex":
        """Return the selected rows of the batch: a bool (B,) mask, int64 (N,) row numbers, or a slice."""
        return TokenIndex(self.position[rows], self.episode[rows])

    def at(self, tokens: slice) -> "TokenIndex":
        """Return the selected slots of every row, as views."""
        return TokenIndex(self.position[:, tokens], self.episode[:, tokens])

    def last(self, length: int) -> "TokenIndex":
        """Return the last ``length`` slots of every row, as views."""
        return self.at(slice(self.shape[1] - length, None))
