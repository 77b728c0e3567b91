"""Collection of the returns of episodes in parallel environments."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlxf.envs.batches import LOST, is_filler
from rlxf.evaluation.report import Report
from rlxf.utils.errors import FaultyEnvironmentError

Info = dict[str, Any]
Score = tuple[float, int]
"""Return and length of an episode."""


def quotas(episodes: int, n_envs: int) -> np.ndarray:
    """Return the number of episodes that each environment contributes, int64 (n_envs,), split evenly.

    Counting the first ``episodes`` that end would be biased to short episodes. SB3 uses the same quotas.
    """
    return (episodes + np.arange(n_envs)) // n_envs


def accumulated_score(info: Info, score: Score) -> Score | None:
    """Return the score accumulated by `EpisodeCounter`."""
    return score


def monitored_score(info: Info, score: Score) -> Score | None:
    """Return the score of SB3's ``Monitor``, which is inside wrappers that change rewards.

    It is None if a wrapper outside the monitor ended the episode early, as Atari wrappers do when a life is
    lost.
    """
    episode = info.get("episode")
    return None if episode is None else (float(episode["r"]), int(episode["l"]))


class EpisodeCounter:
    """Accumulator of rewards and of the scores of the episodes that count.

    Args:
        quota: number of episodes to count for each environment, int64 (n_envs,).
        score: `accumulated_score` or `monitored_score`.

    Attributes:
        missing: number of episodes still to be counted for each environment, int64 (n_envs,).
    """

    def __init__(self, quota: np.ndarray, score: Callable[[Info, Score], Score | None]):
        self.missing = quota.copy()
        self._score = score
        self._sums = np.zeros(len(quota))
        self._steps = np.zeros(len(quota), dtype=np.int64)
        self._scores: list[Score] = []
        self._successes: list[Any] = []

    @property
    def count(self) -> int:
        """Number of episodes counted so far."""
        return len(self._scores)

    def add(self, rewards: np.ndarray, dones: np.ndarray, infos: Sequence[Info]) -> None:
        """Count one step of every environment.

        Raises:
            FaultyEnvironmentError: if a reward is NaN or infinite.
        """
        played = ~is_filler(infos)
        self._steps += played
        self._check_rewards(rewards, played)
        self._sums += np.where(played, rewards, 0.0)
        self._drop([i for i, info in enumerate(infos) if info.get(LOST, False)])
        for i in np.flatnonzero(dones & played).tolist():
            self._end(i, infos[i])

    def report(self) -> Report:
        """Return a report of the counted episodes, in the order in which they ended."""
        returns, lengths = zip(*self._scores, strict=True)
        return Report(
            np.array(returns, dtype=np.float64), np.array(lengths, dtype=np.int64), self._success_array()
        )

    def _drop(self, lost: list[int]) -> None:
        """Discard the running episodes of environments that failed."""
        self._sums[lost] = self._steps[lost] = 0

    def _end(self, i: int, info: Info) -> None:
        score = self._score(info, (float(self._sums[i]), int(self._steps[i])))
        if score is None:
            return
        self._sums[i] = self._steps[i] = 0
        if self.missing[i]:
            self.missing[i] -= 1
            self._scores.append(score)
            self._successes.append(info.get("is_success"))

    def _success_array(self) -> np.ndarray | None:
        # Some environments report only successes; a missing report is then a failure.
        unreported = all(success is None for success in self._successes)
        return None if unreported else np.array(self._successes).astype(bool)

    def _check_rewards(self, rewards: np.ndarray, played: np.ndarray) -> None:
        for i in np.flatnonzero(played & ~np.isfinite(rewards)):
            raise FaultyEnvironmentError(
                f"reward must be finite, got {rewards[i]} from environment {i} "
                f"at step {self._steps[i]} of its episode"
            )
