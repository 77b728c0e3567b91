"""Environments that give out their state, so that a training can go on amid an episode."""

from abc import ABC, abstractmethod
from typing import Any


class Resumable(ABC):
    """Also a base of a Gymnasium ``VectorEnv`` that can go on where it was, in another process.

    Where several processes train together, a list in the state that is as long as there are environments has
    a row for each of them; all else has to be the same in all processes.

    Single environments need not be: those of `rlxf.envs.make_vec_env` are `Replayable`.
    """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that later steps depend on, random generators included, as JSON without NaN."""

    @abstractmethod
    def take_up(self, state: dict[str, Any]) -> None:
        """Go on behind `state`, without a reset: made with the same arguments, the same steps follow."""
