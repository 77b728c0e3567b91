"""Random policy, and agents with random actions mixed in."""

from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import PolicyPredictor


class RandomActions:
    """Policy that samples uniformly from the action space.

    Args:
        action_space: action space of one environment.
        seed: seed of the actions.
    """

    def __init__(self, action_space: spaces.Space[Any], seed: int):
        self._space = deepcopy(action_space)
        self._space.seed(seed)

    def sample(self, n_envs: int) -> NDArray[Any]:
        """Sample one action for each environment, (E, ...)."""
        return np.stack([self._space.sample() for _ in range(n_envs)])

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], None]:
        """Return random actions (E, ...), with the interface of SB3; E is the length of ``episode_start``."""
        assert episode_start is not None
        return self.sample(len(episode_start)), None


class WithRandomActions:
    """Agent whose actions are replaced by random ones with probability ``share``.

    The agent is not informed: its memory has the actions that it chose, not those that were taken.

    Args:
        agent: object with SB3's ``predict``.
        share: probability of a random action, from 0 to 1.
        action_space: action space of one environment.
        seed: seed of the random actions and of the choice of steps.
    """

    def __init__(self, agent: PolicyPredictor, share: float, action_space: spaces.Space[Any], seed: int):
        self.agent, self.share = agent, share
        self._random = RandomActions(action_space, seed)
        self._rng = np.random.default_rng(seed)

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], Any]:
        """Return the agent's actions and state, with some actions replaced by random ones."""
        actions, state = self.agent.predict(observation, state, episode_start, deterministic)
        replaced = self._rng.random(len(actions)) < self.share
        if replaced.any():
            actions = np.array(actions)
            actions[replaced] = self._random.sample(len(actions))[replaced]
        return actions, state
