"""Buffer of a running episode."""

from typing import Any

import numpy as np
from minari.data_collector import EpisodeBuffer
from numpy.typing import NDArray

from rlxf.collection.stored import first_bad, stack
from rlxf.envs.errors import FaultyEnvironmentError


class Episode:
    """Buffer of the observations, actions and rewards of a running episode.

    Args:
        observation: first observation.
    """

    def __init__(self, observation: Any):
        self._observations = [observation]
        self._actions: list[NDArray[Any]] = []
        self._rewards: list[float] = []

    def add(self, action: NDArray[Any], reward: float, observation: Any) -> None:
        """Add a step: the action, its reward and the next observation."""
        self._actions.append(action)
        self._rewards.append(reward)
        self._observations.append(observation)

    def ended(self, truncated: bool) -> EpisodeBuffer:
        """Return the complete episode of T steps and T + 1 observations.

        Args:
            truncated: mark the last step as truncated instead of terminated.

        Raises:
            FaultyEnvironmentError: if an observation or a reward is NaN or infinite.
        """
        buffer = EpisodeBuffer(
            observations=stack(self._observations),
            actions=np.stack(self._actions),
            rewards=np.array(self._rewards, np.float32),
            terminations=self._is_last() & (not truncated),
            truncations=self._is_last() & truncated,
        )
        _check(buffer)
        return buffer

    def _is_last(self) -> NDArray[np.bool_]:
        return np.arange(len(self._rewards)) == len(self._rewards) - 1


def _check(episode: EpisodeBuffer) -> None:
    for name, rows in (("observation", episode.observations), ("reward", episode.rewards)):
        row = first_bad(rows)
        if row is not None:
            raise FaultyEnvironmentError(f"the {name} of step {row} of an episode is NaN or infinite")
