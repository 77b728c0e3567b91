"""Replay buffer of whole episodes for the online fine-tuning of a Decision Transformer."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlxf.data import Trajectories, return_to_go


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


class ReplayBuffer:
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
        terminated = np.zeros(data.steps, np.bool_)
        terminated[data.offsets[1:] - 1] = data.terminated
        steps = Transitions(data.observations, data.actions, data.rewards, terminated)
        episodes = split(steps, data.lengths)
        self.data = data
        self.episodes = deque((episodes[e] for e in best.tolist()), maxlen=capacity)
        self.added = 0

    def extend(self, episodes: Sequence[Transitions]) -> None:
        """Add collected episodes; the oldest episodes beyond the capacity are removed."""
        self.episodes.extend(episodes)
        self.added += len(episodes)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return the collected episodes, concatenated; those of the dataset need not be saved."""
        if not self.added:
            return {}
        collected = list(self.episodes)[-self.added :]
        lengths = np.array([len(episode.rewards) for episode in collected])
        return concatenate(collected)._asdict() | {"lengths": lengths}

    def load_state_dict(self, arrays: Mapping[str, NDArray[Any]], added: int) -> None:
        """Restore the result of `state_dict` in a new buffer of the same dataset.

        As in `extend`, the oldest episodes beyond the capacity are removed.

        Args:
            arrays: result of `state_dict`.
            added: number of episodes added so far, including those that were removed.
        """
        if arrays:
            collected = Transitions(*(arrays[name] for name in Transitions._fields))
            self.episodes.extend(split(collected, arrays["lengths"]))
        self.added = added

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
