"""What the agent carries from step to step while it acts."""

from dataclasses import dataclass

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

    def rows(self, rows: Tensor) -> "Acting":
        """A copy of the chosen environments: ``rows`` is a bool (E,) or an int64 (N,) tensor."""
        return Acting(self.cache.rows(rows), self.position[rows], self.episode[rows], self.action[rows])

    def copy(self) -> "Acting":
        """A copy of all of it."""
        return Acting(self.cache.copy(), self.position, self.episode, self.action)


def without(index: Index, filler: Tensor) -> Index:
    """``index`` (E, 1) with the environments of ``filler`` (E,) bool marked as empty slots."""
    return Index(index.position, index.episode.masked_fill(filler[:, None], EMPTY))
