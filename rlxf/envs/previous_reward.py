"""Wrapper that adds the previous reward to the observation."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlxf.envs.spaces import check_spaces

REWARD, OBSERVATION = "previous_reward", "observation"


class PreviousReward(gymnasium.Wrapper):
    """Wrapper that makes the observation a Dict and adds the reward of the previous step; zero at reset.

    - ``observation``: the inner observation. If that is a Dict already, its own keys stay instead.
    - ``previous_reward`` float32 (1,): the unscaled reward.

    It is for tasks whose rewards carry information that the observations lack, such as bandits. `GTrXLPPO`
    adds the previous action itself; for other agents, `PreviousStep` adds both.

    Args:
        env: an environment with a supported space (`check_spaces`).

    Raises:
        TypeError: if a space is not supported.
        ValueError: if the inner Dict already has a key that is added.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        check_spaces(env.observation_space, env.action_space)
        inner = env.observation_space
        self._is_dict = isinstance(inner, spaces.Dict)
        parts = dict(inner.spaces) if isinstance(inner, spaces.Dict) else {OBSERVATION: inner}
        added = self._added_spaces()
        if clash := sorted(added.keys() & parts.keys()):
            name = type(self).__name__
            raise ValueError(
                f"the observation of {env} already has {clash}: rename the key or leave out {name}"
            )
        self.observation_space = spaces.Dict(parts | added)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the inner environment; the added parts are zeros."""
        observation, info = self.env.reset(seed=seed, options=options)
        zeros = {key: np.zeros_like(space.low) for key, space in self._added_spaces().items()}
        return self._join(observation, zeros), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the inner environment, and add the parts of this step to the observation."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._join(observation, self._added(action, reward)), reward, terminated, truncated, info

    def _added_spaces(self) -> dict[str, spaces.Box]:
        return {REWARD: spaces.Box(-np.inf, np.inf, (1,), np.float32)}

    def _added(self, action: Any, reward: Any) -> dict[str, np.ndarray]:
        return {REWARD: np.array([float(reward)], dtype=np.float32)}

    def _join(self, observation: Any, added: dict[str, np.ndarray]) -> dict[str, Any]:
        parts = observation if self._is_dict else {OBSERVATION: observation}
        return {**parts, **added}
