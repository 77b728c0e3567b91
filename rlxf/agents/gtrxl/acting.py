"""What the agent carries from step to step while it acts."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rlxf.attention.cache import Cache
from rlxf.attention.index import EMPTY, Index


@dataclass(eq=False)
class Acting:
    """Where each of E environments stands in its episode, and what it remembers of it.

    `predict` gives it out as its state and takes it back; look at nothing in it.

    Args:
        cache: keys and values of the last tokens.
        position: (E,) int64, steps since the start of the episode.
        episode: (E,) int64, number of the episode.
        action: (E, A), the action before, encoded; 0 at the start of an episode.
    """

    cache: Cache
    position: Tensor
    episode: Tensor
    action: Tensor

    def advance(self, episode_start: Tensor) -> Index:
        """Go to the next token: (E, 1). ``episode_start`` (E,) bool marks first steps."""
        self.position = torch.where(episode_start, 0, self.position + 1)
        self.episode = self.episode + episode_start.long()
        self.action = self.action.masked_fill(episode_start[:, None], 0.0)
        return Index(self.position[:, None], self.episode[:, None])

    def took(self, action: Tensor, index: Index) -> None:
        """Note encoded actions (E, A); environments ignore those at empty slots of ``index`` (E, 1)."""
        self.action = torch.where(index.episode == EMPTY, self.action, action)

    def begin_anew(self, rows: Tensor) -> None:
        """Remember nothing of the environments of ``rows`` (E,) bool, even if memory outlasts episodes."""
        self.position = self.position.masked_fill(rows, -1)
        self.episode = self.episode + rows.long()
        self.action = self.action.masked_fill(rows[:, None], 0.0)

    def rows(self, rows: Tensor) -> Self:
        """A copy of the chosen environments: ``rows`` is a bool (E,) or an int64 (N,) tensor."""
        position, episode, action = self.position[rows], self.episode[rows], self.action[rows]
        return replace(self, cache=self.cache.rows(rows), position=position, episode=episode, action=action)

    def copy(self) -> Self:
        """A copy of all of it."""
        return replace(self, cache=self.cache.copy())


@dataclass(eq=False)
class ActingAcrossEpisodes(Acting):
    """One memory for all episodes of an environment: steps are counted from the first one on."""

    def advance(self, episode_start: Tensor) -> Index:
        """See `Acting`; only where nothing has begun yet does something begin."""
        return super().advance(self.episode == EMPTY)


def without(index: Index, filler: Tensor) -> Index:
    """``index`` (E, 1) with the environments of ``filler`` (E,) bool marked as empty slots."""
    return Index(index.position, index.episode.masked_fill(filler[:, None], EMPTY))
