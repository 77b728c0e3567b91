"""Prediction of actions for only those environments that still have episodes to play."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import PolicyPredictor

from rlxf.envs.infos import rows_of


class Narrowing:
    """Agent for E environments that predicts only for the active ones.

    Episodes differ in length, so few environments are active at the end of an evaluation. Inactive
    environments repeat their last action without a prediction. This needs an agent without state, or a state
    with ``rows(mask)``, which selects environments. For other agents, all E environments stay active.

    Args:
        agent: object with SB3's ``predict``.
        n_envs: number of environments E.
        deterministic: use the most likely action instead of a sample.
    """

    def __init__(self, agent: PolicyPredictor, n_envs: int, deterministic: bool):
        self._agent, self._deterministic = agent, deterministic
        self._rows = np.arange(n_envs)
        self._state: Any = None
        self._actions: NDArray[Any] | None = None

    def act(self, observation: Any, starts: NDArray[np.bool_], playing: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the actions (E, ...).

        Args:
            observation: observation of all environments.
            starts: mask of the environments at the start of an episode, (E,).
            playing: mask of the active environments, (E,). An inactive environment stays inactive.
        """
        if self._actions is not None:  # the first step predicts for all, so each has an action to repeat
            self._select(playing[self._rows])
        predicted, self._state = self._agent.predict(
            rows_of(observation, self._rows),
            state=self._state,
            episode_start=starts[self._rows],
            deterministic=self._deterministic,
        )
        actions = np.array(predicted) if self._actions is None else self._actions.copy()
        actions[self._rows] = predicted
        self._actions = actions
        return actions

    def _select(self, playing: NDArray[np.bool_]) -> None:
        if playing.all() or not (self._state is None or hasattr(self._state, "rows")):
            return
        self._rows = self._rows[playing]
        if self._state is not None:
            self._state = self._state.rows(torch.from_numpy(playing))
