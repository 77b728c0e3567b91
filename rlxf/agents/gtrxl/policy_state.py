"""Recurrent state of the policy: KV cache, positions and previous actions of each environment."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rlxf.attention.cache import KVCache
from rlxf.attention.token_index import EMPTY, TokenIndex


@dataclass(eq=False)
class RecurrentPolicyState:
    """Recurrent state of the policy for E environments.

    `predict` returns it as ``state`` and accepts it in the next call. Its contents are internal.

    Args:
        cache: KV cache of the last tokens.
        position: (E,) int64, steps since the start of the episode.
        episode: (E,) int64, number of the episode.
        action: (E, A), the encoded previous action; 0 at the start of an episode.
    """

    cache: KVCache
    position: Tensor
    episode: Tensor
    action: Tensor

    def advance(self, episode_start: Tensor) -> TokenIndex:
        """Advance to the next token and return its index (E, 1); ``episode_start`` (E,) bool marks resets."""
        self.position = torch.where(episode_start, 0, self.position + 1)
        self.episode = self.episode + episode_start.long()
        self.action = self.action.masked_fill(episode_start[:, None], 0.0)
        return TokenIndex(self.position[:, None], self.episode[:, None])

    def observe_action(self, action: Tensor, index: TokenIndex) -> None:
        """Store encoded actions (E, A), except for environments with an empty slot in ``index`` (E, 1)."""
        self.action = torch.where(index.episode == EMPTY, self.action, action)

    def reset(self, rows: Tensor) -> None:
        """Clear the memory of the environments ``rows`` (E,) bool, even if it persists across episodes."""
        self.position = self.position.masked_fill(rows, -1)
        self.episode = self.episode + rows.long()
        self.action = self.action.masked_fill(rows[:, None], 0.0)

    def rows(self, rows: Tensor) -> Self:
        """Return a copy of the chosen environments; ``rows`` is a bool (E,) or an int64 (N,) tensor."""
        position, episode, action = self.position[rows], self.episode[rows], self.action[rows]
        return replace(self, cache=self.cache.rows(rows), position=position, episode=episode, action=action)

    def copy(self) -> Self:
        """Return a copy of the state."""
        return replace(self, cache=self.cache.copy())


@dataclass(eq=False)
class PersistentPolicyState(RecurrentPolicyState):
    """Recurrent state that persists across episodes: positions count from the first step of all episodes."""

    def advance(self, episode_start: Tensor) -> TokenIndex:
        """Advance like `RecurrentPolicyState`, but reset only environments without any previous step."""
        return super().advance(self.episode == EMPTY)


def mark_filler_rows(index: TokenIndex, filler: Tensor) -> TokenIndex:
    """Return ``index`` (E, 1) with the environments ``filler`` (E,) bool marked as empty slots."""
    return TokenIndex(index.position, index.episode.masked_fill(filler[:, None], EMPTY))
