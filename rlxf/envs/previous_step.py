"""The previous action and reward as part of the observation."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlxf.envs.spaces import check_spaces

ACTION, REWARD, OBSERVATION = "previous_action", "previous_reward", "observation"


class PreviousStep(gymnasium.Wrapper):
    """The observation becomes a Dict with the action and the reward of the step before; zeros at reset.

    - ``observation``: the inner observation. If that is a Dict already, its own keys stay instead.
    - ``previous_action`` float32 (A,): one-hot for Discrete; the parts' one-hots in a row for MultiDiscrete;
      the numbers themselves, flattened, for Box and MultiBinary.
    - ``previous_reward`` float32 (1,): the reward as it came.

    What the agent did and got is then in its memory, with any MultiInput policy and in every tool that steps
    the environment (RL^2: Duan et al. 2016, arXiv:1611.02779, section 2.2).

    Args:
        env: an environment with a supported space (`check_spaces`).

    Raises:
        TypeError: if a space is not supported.
        ValueError: if the inner Dict already has one of the two keys.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        check_spaces(env.observation_space, env.action_space)
        inner = env.observation_space
        self._action_size = spaces.flatdim(env.action_space)
        self._is_dict = isinstance(inner, spaces.Dict)
        parts = dict(inner.spaces) if isinstance(inner, spaces.Dict) else {OBSERVATION: inner}
        clash = sorted({ACTION, REWARD} & parts.keys())
        if clash:
            raise ValueError(
                f"the observation of {env} already has {clash}: rename it or leave out PreviousStep"
            )
        self.observation_space = spaces.Dict(parts | _added(env.action_space))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the inner environment; previous action and reward are zeros."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._join(observation, np.zeros(self._action_size, dtype=np.float32), 0.0), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the inner environment; ``action`` and its reward enter the observation."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        encoded = encode_action(self.env.action_space, action)
        return self._join(observation, encoded, float(reward)), reward, terminated, truncated, info

    def _join(self, observation: Any, action: NDArray[np.float32], reward: float) -> dict[str, Any]:
        parts = observation if self._is_dict else {OBSERVATION: observation}
        return {**parts, ACTION: action, REWARD: np.array([reward], dtype=np.float32)}


def encode_action(space: spaces.Space, action: Any) -> NDArray[np.float32]:
    """``action`` of ``space`` as float32 (A,): Discrete parts one-hot, others flattened."""
    return np.asarray(spaces.flatten(space, action), dtype=np.float32)


def _added(action_space: spaces.Space) -> dict[str, spaces.Space]:
    flat = spaces.flatten_space(action_space)
    assert isinstance(flat, spaces.Box)  # as for every space that check_spaces lets through
    low, high = np.minimum(flat.low, 0), np.maximum(flat.high, 0)  # zeros at reset must lie inside
    return {
        ACTION: spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32),
        REWARD: spaces.Box(-np.inf, np.inf, (1,), np.float32),
    }
