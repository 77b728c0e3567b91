"""Episodes to go on learning from: the best of the data, then those that the agent plays."""

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
    """T steps, encoded as in `Trajectories`.

    Args:
        observations: (T, D) or (T, C, H, W).
        actions: (T, ...).
        rewards: (T,).
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]


class Replay:
    """The last N episodes, in memory. It begins with the best of the data, the worst of which leave first.

    Source: Zheng et al. 2022, arXiv:2202.05607, section 4.1, algorithm 1.

    Args:
        data: what the agent has learned from so far.
        capacity: N, at least 1.
    """

    def __init__(self, data: Trajectories, capacity: int):
        best = np.argsort(data.returns, kind="stable")[-capacity:]
        self.data, self.capacity = data, capacity
        self.episodes = deque((self._of_data(e) for e in best.tolist()), maxlen=capacity)
        self.added = 0

    def extend(self, episodes: Sequence[Episode]) -> None:
        """Add collected episodes; the same number of the oldest ones is removed."""
        self.episodes.extend(episodes)
        self.added += len(episodes)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the collected episodes, concatenated; those of the data need not be saved."""
        played = list(self.episodes)[-self.added :] if self.added else []
        if not played:
            return {}
        parts = {name: np.concatenate([getattr(each, name) for each in played]) for name in PARTS}
        return parts | {"lengths": np.array([len(each.rewards) for each in played])}

    def load_arrays(self, arrays: Mapping[str, NDArray[Any]], added: int) -> None:
        """Restore the result of `arrays` in a replay of the same data without added episodes.

        Args:
            arrays: of `arrays`.
            added: episodes that were added so far, including those that were removed.
        """
        played: list[Episode] = []
        if arrays:
            ends = np.cumsum(arrays["lengths"])[:-1]
            parts = [np.split(arrays[name], ends) for name in PARTS]
            played = [Episode(*each) for each in zip(*parts, strict=True)]
        too_many = len(self.episodes) + added - self.capacity
        for _ in range(min(len(self.episodes), too_many)):
            self.episodes.popleft()
        self.episodes.extend(played)
        self.added = added

    def trajectories(self) -> Trajectories:
        """All of them as flat arrays, each step with the return that was had from there (hindsight)."""
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
