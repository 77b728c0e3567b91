"""Wrapper that adds the previous action, reward and done flag to the observation, also across episodes."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlxf.envs.previous_step import PreviousStep

DONE = "previous_done"


class PreviousTransition(PreviousStep):
    """`PreviousStep` that persists across episodes and adds a done flag: the input of an RL^2 agent.

    The first observation of an episode has the last action and reward of the previous episode. An agent
    whose memory persists across episodes (``GTrXLPPO(across_episodes=True)``) thus observes final rewards.

    - ``previous_action``, ``previous_reward``: as in `PreviousStep`.
    - ``previous_done`` float32 (1,): 1 in the first observation of an episode that follows another, else 0.

    All are zeros at the first reset, at a reset with a seed, and at a reset in the middle of an episode.

    Source: Duan et al. 2016, arXiv:1611.02779, section 2.2 (there the flag is named d).

    Args:
        env: an environment with a supported space (`check_spaces`).

    Raises:
        TypeError: if a space is not supported.
        ValueError: if the inner Dict already has one of the three keys.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._end: dict[str, np.ndarray] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the inner environment, and add the last action and reward of the previous episode."""
        end, self._end = self._end, None
        observation, info = super().reset(seed=seed, options=options)
        return (observation if end is None or seed is not None else observation | end), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the inner environment, and add action and reward to the observation."""
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            self._end = self._added(action, reward) | {DONE: np.ones(1, np.float32)}
        return observation, reward, terminated, truncated, info

    def _added_spaces(self) -> dict[str, spaces.Box]:
        return {**super()._added_spaces(), DONE: spaces.Box(0.0, 1.0, (1,), np.float32)}

    def _added(self, action: Any, reward: Any) -> dict[str, np.ndarray]:
        return {**super()._added(action, reward), DONE: np.zeros(1, np.float32)}
