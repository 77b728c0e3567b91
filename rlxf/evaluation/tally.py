"""Counting the episodes of environments that run side by side."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlxf.envs.errors import FaultyEnvironmentError
from rlxf.envs.infos import LOST
from rlxf.evaluation.report import Report

Info = dict[str, Any]
Score = tuple[float, int]
"""Return and length of an episode."""


def quotas(episodes: int, n_envs: int) -> np.ndarray:
    """Episodes each environment contributes, int64 (n_envs,), as even as can be.

    Taking the first ``episodes`` to end, whoever plays them, would favour short ones. These are SB3's.
    """
    return (episodes + np.arange(n_envs)) // n_envs


def own_score(info: Info, score: Score) -> Score | None:
    """The score that was counted here."""
    return score


def monitored_score(info: Info, score: Score) -> Score | None:
    """The score of SB3's monitor, which stands below wrappers that change rewards.

    None if an episode that goes on was reset above the monitor, as Atari does when a life is lost.
    """
    episode = info.get("episode")
    return None if episode is None else (float(episode["r"]), int(episode["l"]))


def is_filler(infos: Sequence[Info]) -> np.ndarray:
    """Bool (n_envs,): rows in which an environment was only reset. They are no part of an episode."""
    return np.array([info.get("filler", False) for info in infos], dtype=bool)


class Tally:
    """Sums up rewards and keeps the scores of the episodes that count.

    Args:
        quota: episodes wanted of each environment, int64 (n_envs,).
        score: `own_score` or `monitored_score`.
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
        """Episodes counted so far."""
        return len(self._scores)

    def add(self, rewards: np.ndarray, dones: np.ndarray, infos: Sequence[Info]) -> None:
        """Count one step of every environment.

        Raises:
            FaultyEnvironmentError: if a reward is NaN or infinite.
        """
        played = ~is_filler(infos)
        self._steps += played
        self._check(rewards, played)
        self._sums += np.where(played, rewards, 0.0)
        self._drop([i for i, info in enumerate(infos) if info.get(LOST, False)])
        for i in np.flatnonzero(dones & played).tolist():
            self._end(i, infos[i])

    def report(self) -> Report:
        """The episodes counted, in the order in which they ended."""
        returns, lengths = zip(*self._scores, strict=True)
        return Report(
            np.array(returns, dtype=np.float64), np.array(lengths, dtype=np.int64), self._outcomes()
        )

    def _drop(self, broken: list[int]) -> None:
        """An episode that broke off counts for nothing."""
        self._sums[broken] = self._steps[broken] = 0

    def _end(self, i: int, info: Info) -> None:
        score = self._score(info, (float(self._sums[i]), int(self._steps[i])))
        if score is None:
            return
        self._sums[i] = self._steps[i] = 0
        if self.missing[i]:
            self.missing[i] -= 1
            self._scores.append(score)
            self._successes.append(info.get("is_success"))

    def _outcomes(self) -> np.ndarray | None:
        # An environment that speaks of success only when there was one means failure by silence.
        silent = all(success is None for success in self._successes)
        return None if silent else np.array(self._successes).astype(bool)

    def _check(self, rewards: np.ndarray, played: np.ndarray) -> None:
        for i in np.flatnonzero(played & ~np.isfinite(rewards)):
            raise FaultyEnvironmentError(
                f"reward must be finite, got {rewards[i]} from environment {i} "
                f"at step {self._steps[i]} of its episode"
            )
