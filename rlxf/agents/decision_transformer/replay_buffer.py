"""Replay buffer of whole episodes for the online fine-tuning of a Decision Transformer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlxf.data import Trajectories, return_to_go
from rlxf.utils.checks import check_choice


class Transitions(NamedTuple):
    """Observations, actions, rewards and terminations of N steps, encoded as in `Trajectories`.

    They belong to an episode of N steps, or to N environments at one step.

    Args:
        observations: (N, D) or (N, C, H, W).
        actions: (N, ...).
        rewards: (N,).
        terminated: bool (N,), True if the step led to a terminal state. The last step of an episode that was
            truncated is False.
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]
    terminated: NDArray[np.bool_]


def concatenate(episodes: Iterable[Transitions]) -> Transitions:
    """Concatenate episodes along the axis of steps."""
    return Transitions(*map(np.concatenate, zip(*episodes, strict=True)))


def split(steps: Transitions, lengths: NDArray[np.integer[Any]]) -> list[Transitions]:
    """Split steps into consecutive episodes of the given lengths, without a copy."""
    parts = (np.split(part, np.cumsum(lengths)[:-1]) for part in steps)
    return [Transitions(*episode) for episode in zip(*parts, strict=True)]


WORST = "worst"
OLDEST = "oldest"
OLDEST_OF_WORSE = "oldest-of-worse"
REMOVALS = (WORST, OLDEST, OLDEST_OF_WORSE)
"""Episodes that a full `ReplayBuffer` removes first."""


class ReplayBuffer:
    """Replay buffer of N episodes, in memory.

    It initially holds the best episodes of the dataset. Beyond the capacity, episodes are removed: those with
    the lowest return, the oldest, or the oldest of the worse half, those below the ``(N + 1) // 2`` best. The
    episodes of the dataset are older than all others; among them, those with the lowest return are older.

    Source: Zheng et al. 2022, arXiv:2202.05607, section 4.1, algorithm 1, which removes the oldest ones.
    Keeping the best is self-imitation (Oh et al. 2018, arXiv:1806.05635). A buffer of only the best episodes
    has no failures of the current policy, so a critic never learns the values of their states. With the
    oldest of the worse half removed, the newest failures are in the buffer next to the best episodes.

    Args:
        data: offline dataset of the agent.
        capacity: number of episodes N, at least 1.
        remove: one of `REMOVALS`.

    Raises:
        ValueError: if remove is unknown.
    """

    def __init__(self, data: Trajectories, capacity: int, remove: str = WORST):
        check_choice("replay_remove", remove, REMOVALS)
        best = np.argsort(data.returns, kind="stable")[-capacity:].tolist()
        terminated = np.zeros(data.steps, np.bool_)
        terminated[data.offsets[1:] - 1] = data.terminated
        steps = Transitions(data.observations, data.actions, data.rewards, terminated)
        logged = split(steps, data.lengths)
        self.data = data
        self.capacity = capacity
        self.remove = remove
        self.episodes = [logged[e] for e in best]
        self._returns = [float(data.returns[e]) for e in best]
        self._logged = len(best)

    @property
    def collected(self) -> list[Transitions]:
        """Episodes that are not from the dataset, by age."""
        return self.episodes[self._logged :]

    def extend(self, episodes: Sequence[Transitions]) -> None:
        """Add collected episodes; episodes beyond the capacity are removed."""
        self.episodes += episodes
        self._returns += [float(episode.rewards.sum(dtype=np.float64)) for episode in episodes]
        if len(self.episodes) > self.capacity:
            self._keep(sorted(self._preferred()[: self.capacity]))

    def _preferred(self) -> list[int]:
        """Return the places in `episodes`, those to keep first; of equal returns, the newest are kept."""
        newest_first = list(range(len(self.episodes)))[::-1]
        if self.remove == OLDEST:
            return newest_first
        best_first = sorted(newest_first, key=self._returns.__getitem__, reverse=True)
        if self.remove == WORST:
            return best_first
        better = best_first[: (self.capacity + 1) // 2]
        return better + sorted(set(newest_first) - set(better), reverse=True)

    def _keep(self, places: Sequence[int]) -> None:
        """Remove all episodes but those at these places, in ascending order."""
        self.episodes = [self.episodes[place] for place in places]
        self._returns = [self._returns[place] for place in places]
        self._logged = sum(place < self._logged for place in places)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the collected episodes, concatenated; those of the dataset need not be saved."""
        if not self.collected:
            return {}
        lengths = np.array([len(episode.rewards) for episode in self.collected])
        return concatenate(self.collected)._asdict() | {"lengths": lengths}

    def load_state_dict(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `state_dict` in a new buffer of the same dataset."""
        if arrays:
            collected = Transitions(*(arrays[name] for name in Transitions._fields))
            self.extend(split(collected, arrays["lengths"]))

    def trajectories(self) -> Trajectories:
        """Return all episodes as flat arrays; returns-to-go are those achieved (hindsight relabeling).

        An episode whose last step did not lead to a terminal state counts as truncated.
        """
        rewards = [episode.rewards for episode in self.episodes]
        offsets = np.cumsum([0, *map(len, rewards)])
        steps = concatenate(self.episodes)._asdict()
        terminated = steps.pop("terminated")[offsets[1:] - 1]
        return replace(
            self.data,
            **steps,
            return_to_go=np.concatenate([return_to_go(each) for each in rewards]).astype(np.float32),
            offsets=offsets,
            terminated=terminated,
            truncated=~terminated,
        )
