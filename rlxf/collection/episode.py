"""An episode while it is played."""

from typing import Any

import numpy as np
from minari.data_collector import EpisodeBuffer
from numpy.typing import NDArray

from rlxf.collection.stored import first_bad, stack
from rlxf.envs.errors import FaultyEnvironmentError


class Episode:
    """What was seen, done and paid so far.

    Args:
        observation: the first one.
    """

    def __init__(self, observation: Any):
        self._observations = [observation]
        self._actions: list[NDArray[Any]] = []
        self._rewards: list[float] = []

    def add(self, action: NDArray[Any], reward: float, observation: Any) -> None:
        """One step: the action, what it paid, and what was seen then."""
        self._actions.append(action)
        self._rewards.append(reward)
        self._observations.append(observation)

    def ended(self, truncated: bool) -> EpisodeBuffer:
        """All of it, T steps and T + 1 observations. The last step was terminated unless it was truncated.

        Raises:
            FaultyEnvironmentError: if an observation or a reward is NaN or infinite.
        """
        buffer = EpisodeBuffer(
            observations=stack(self._observations),
            actions=np.stack(self._actions),
            rewards=np.array(self._rewards, np.float32),
            terminations=self._last() & (not truncated),
            truncations=self._last() & truncated,
        )
        _check(buffer)
        return buffer

    def _last(self) -> NDArray[np.bool_]:
        return np.arange(len(self._rewards)) == len(self._rewards) - 1


def _check(episode: EpisodeBuffer) -> None:
    for name, rows in (("observation", episode.observations), ("reward", episode.rewards)):
        row = first_bad(rows)
        if row is not None:
            raise FaultyEnvironmentError(f"the {name} of step {row} of an episode is NaN or infinite")
