"""Where each token stands: its position in its episode, and which episode that is."""

from dataclasses import dataclass

import torch
from torch import Tensor

EMPTY = -1
"""Episode number of a slot that holds no token."""


@dataclass(frozen=True, eq=False)
class Index:
    """Position and episode of every token of a batch.

    Tokens attend only to tokens of their own episode. The numbers mean nothing across rows of
    the batch. A slot with episode -1 is empty: nothing attends to it and its output is 0.

    Args:
        position: (B, T) int64, steps since the start of the episode, from 0.
        episode: (B, T) int64, number of the episode, -1 for an empty slot.

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
    def range(cls, batch: int, length: int, start: int = 0, device: torch.device | None = None) -> "Index":
        """One episode a row: positions start ... start + length - 1."""
        position = torch.arange(start, start + length, device=device).expand(batch, length)
        return cls(position, torch.zeros_like(position))

    @classmethod
    def empty(cls, batch: int, length: int, device: torch.device | None = None) -> "Index":
        """Empty slots only."""
        position = torch.zeros(batch, length, dtype=torch.long, device=device)
        return cls(position, torch.full_like(position, EMPTY))

    @property
    def shape(self) -> torch.Size:
        """(B, T)."""
        return self.position.shape

    @property
    def unbroken(self) -> bool:
        """Whether each episode is one run of slots whose positions count up by one."""
        episode, position = self.episode, self.position
        before, now = episode[:, :-1], episode[:, 1:]
        goes_on = (now == before) & (position[:, 1:] == position[:, :-1] + 1)
        begins = now > before.cummax(dim=1).values
        return bool((goes_on | begins | (now == EMPTY)).all())

    @property
    def episodes(self) -> Tensor:
        """(B, N): episodes of each row once, `EMPTY` where a row has fewer than others; N is at least 1."""
        ordered = self.episode.sort(dim=1).values
        fresh = (ordered != EMPTY) & (ordered.diff(dim=1, prepend=ordered[:, :1] - 1) != 0)
        number = max(1, int(fresh.sum(1).max()))
        first = (~fresh).sort(dim=1, stable=True).indices[:, :number]
        return torch.where(fresh, ordered, EMPTY).gather(1, first)

    def concatenate(self, later: "Index") -> "Index":
        """This index followed by ``later`` along time."""
        position = torch.cat([self.position, later.position], dim=1)
        return Index(position, torch.cat([self.episode, later.episode], dim=1))

    def rows(self, rows: Tensor) -> "Index":
        """The chosen rows of the batch: ``rows`` is a bool (B,) or an int64 (N,) tensor."""
        return Index(self.position[rows], self.episode[rows])

    def at(self, tokens: slice) -> "Index":
        """The chosen slots of every row, as views."""
        return Index(self.position[:, tokens], self.episode[:, tokens])

    def last(self, length: int) -> "Index":
        """The last ``length`` slots of every row, as views."""
        return self.at(slice(self.shape[1] - length, None))
