"""Replay buffer of online fine-tuning: the best episodes of the dataset and the collected episodes."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlxf.envs.trajectories import Trajectories, return_to_go

PARTS = ("observations", "actions", "rewards")


@dataclass(frozen=True, eq=False)
class Episode:
    """Episode of T steps, encoded as in `Trajectories`.

    Args:
        observations: (T, D) or (T, C, H, W).
        actions: (T, ...).
        rewards: (T,).
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]


class Replay:
    """Replay buffer of the last N episodes, in memory.

    It initially holds the best episodes of the dataset, of which those with the lowest return are removed
    first.

    Source: Zheng et al. 2022, arXiv:2202.05607, section 4.1, algorithm 1.

    Args:
        data: offline dataset of the agent.
        capacity: number of episodes N, at least 1.
    """

    def __init__(self, data: Trajectories, capacity: int):
        best = np.argsort(data.returns, kind="stable")[-capacity:]
        self.data, self.capacity = data, capacity
        self.episodes = deque((self._of_data(e) for e in best.tolist()), maxlen=capacity)
        self.added = 0

    def extend(self, episodes: Sequence[Episode]) -> None:
        """Add collected episodes; the oldest episodes beyond the capacity are removed."""
        self.episodes.extend(episodes)
        self.added += len(episodes)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the collected episodes, concatenated; those of the dataset need not be saved."""
        collected = list(self.episodes)[-self.added :] if self.added else []
        if not collected:
            return {}
        parts = {name: np.concatenate([getattr(episode, name) for episode in collected]) for name in PARTS}
        return parts | {"lengths": np.array([len(episode.rewards) for episode in collected])}

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]], added: int) -> None:
        """Restore the result of `arrays` in a new buffer of the same dataset.

        Args:
            arrays: result of `arrays`.
            added: number of episodes added so far, including those that were removed.
        """
        collected: list[Episode] = []
        if arrays:
            ends = np.cumsum(arrays["lengths"])[:-1]
            parts = [np.split(arrays[name], ends) for name in PARTS]
            collected = [Episode(*episode) for episode in zip(*parts, strict=True)]
        too_many = len(self.episodes) + added - self.capacity
        for _ in range(min(len(self.episodes), too_many)):
            self.episodes.popleft()
        self.episodes.extend(collected)
        self.added = added

    def trajectories(self) -> Trajectories:
        """Return all episodes as flat arrays; returns-to-go are those achieved (hindsight relabeling)."""
        rewards = [episode.rewards for episode in self.episodes]
        ends = np.ones(len(rewards), np.bool_)
        return replace(
            self.data,
            observations=np.concatenate([episode.observations for episode in self.episodes]),
            actions=np.concatenate([episode.actions for episode in self.episodes]),
            rewards=np.concatenate(rewards),
            return_to_go=np.concatenate([return_to_go(each) for each in rewards]).astype(np.float32),
            offsets=np.cumsum([0, *map(len, rewards)]),
            terminated=ends,
            truncated=~ends,
        )

    def _of_data(self, number: int) -> Episode:
        steps = slice(*self.data.offsets[number : number + 2].tolist())
        return Episode(self.data.observations[steps], self.data.actions[steps], self.data.rewards[steps])
