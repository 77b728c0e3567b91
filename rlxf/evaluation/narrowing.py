"""Asking an agent for those environments alone that still have an episode to play."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import PolicyPredictor

from rlxf.envs.infos import rows_of


class Narrowing:
    """Acts for E environments, of which ever fewer count.

    Episodes differ in length, so that at the end of an evaluation few environments play while the others
    idle. Idle ones repeat their last action, for which nobody is asked. That needs an agent without state, or
    a state with ``rows(mask)`` that gives some of its environments; others are asked for all E to the end.

    Args:
        agent: has SB3's ``predict``.
        n_envs: E.
        deterministic: the most likely action instead of a sample.
    """

    def __init__(self, agent: PolicyPredictor, n_envs: int, deterministic: bool):
        self._agent, self._deterministic = agent, deterministic
        self._rows = np.arange(n_envs)
        self._state: Any = None
        self._actions: NDArray[Any] | None = None

    def act(self, observation: Any, starts: NDArray[np.bool_], playing: NDArray[np.bool_]) -> NDArray[Any]:
        """Actions (E, ...).

        Args:
            observation: of all environments.
            starts: (E,) whether it is the first of an episode.
            playing: (E,) which environments count. One that does not never will again.
        """
        if self._actions is not None:  # the first step asks for all, so that each has an action to repeat
            self._keep(playing[self._rows])
        chosen, self._state = self._agent.predict(
            rows_of(observation, self._rows),
            state=self._state,
            episode_start=starts[self._rows],
            deterministic=self._deterministic,
        )
        actions = np.array(chosen) if self._actions is None else self._actions.copy()
        actions[self._rows] = chosen
        self._actions = actions
        return actions

    def _keep(self, playing: NDArray[np.bool_]) -> None:
        if playing.all() or not (self._state is None or hasattr(self._state, "rows")):
            return
        self._rows = self._rows[playing]
        if self._state is not None:
            self._state = self._state.rows(torch.from_numpy(playing))
