"""Less skill than the agent has: some of its actions are drawn at random."""

from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import PolicyPredictor


class RandomActions:
    """Acts at random: uniformly over the action space.

    Args:
        action_space: of one environment.
        seed: of the actions.
    """

    def __init__(self, action_space: spaces.Space[Any], seed: int):
        self._space = deepcopy(action_space)
        self._space.seed(seed)

    def sample(self, n_envs: int) -> NDArray[Any]:
        """One action for each environment, (E, ...)."""
        return np.stack([self._space.sample() for _ in range(n_envs)])

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: NDArray[np.bool_] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], None]:
        """As of Stable-Baselines3's agents; ``episode_start`` (E,) says how many environments there are."""
        assert episode_start is not None
        return self.sample(len(episode_start)), None


class WithRandomActions:
    """The agent, but each of its actions is replaced by a random one with probability ``share``.

    The agent is not told: where it remembers what it did, it remembers what it meant to do.

    Args:
        agent: has SB3's ``predict``.
        share: probability, from 0 to 1.
        action_space: of one environment.
        seed: of the actions and of their places.
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
        """As the agent's."""
        actions, state = self.agent.predict(observation, state, episode_start, deterministic)
        replaced = self._rng.random(len(actions)) < self.share
        if replaced.any():
            actions = np.array(actions)
            actions[replaced] = self._random.sample(len(actions))[replaced]
        return actions, state
