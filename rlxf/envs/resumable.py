"""Interface of vector environments that save their state, so a training can resume within an episode."""

from abc import ABC, abstractmethod
from typing import Any


class Resumable(ABC):
    """Mixin for a Gymnasium ``VectorEnv`` whose state can be saved and loaded in another process.

    In distributed training, lists in the state with one entry per environment are gathered from and split
    over the ranks. Everything else in the state has to be equal on all ranks.

    Single environments do not need this class: those of `rlxf.envs.make_vec_env` are `Replayable`.
    """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state that later steps depend on, with random generators, as JSON without NaN."""

    @abstractmethod
    def take_up(self, state: dict[str, Any]) -> None:
        """Load a `state` without a reset.

        If the environment was created with the same arguments, the same steps follow.
        """
