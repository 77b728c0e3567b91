"""Wrappers that add the previous reward, action or end of an episode to the observation."""

from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from rlxf.envs.gym_api import check_info, raise_interface_error, reset_env
from rlxf.envs.spaces import check_spaces, with_zero

REWARD, OBSERVATION = "previous_reward", "observation"
"""Keys of Dict observations; OBSERVATION is that of an observation that was not a Dict."""


class TransparentWrapper(gymnasium.Wrapper):
    """Base class of wrappers that change no space, so `spec` is that of the environment."""

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]  # as in `gymnasium.Wrapper`
        """Spec of the wrapped environment."""
        return self.env.spec


class OwnLastObservation(TransparentWrapper):
    """Wrapper that returns a copy of the last observation of each episode.

    Vector environments reset an environment in the step that ends its episode. If the environment reuses its
    observation array, the reset would replace the last observation.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        return reset_env(self.env, seed, options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment.

        Raises:
            FaultyEnvironmentError: if ``step`` does not have the interface of Gymnasium.
        """
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except (TypeError, ValueError) as error:
            raise_interface_error("step", self.env, error)
            raise
        if type(info) is not dict:  # the test itself would be a call in every step
            check_info("step", self.env, info)
        if terminated or truncated:
            observation = deepcopy(observation)
        return observation, reward, terminated, truncated, info


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
        observation, info = reset_env(self.env, seed, options)
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


ACTION = "previous_action"
"""Key of the previous action."""


class PreviousStep(PreviousReward):
    """Wrapper that makes the observation a Dict and adds the previous action and reward; zeros at reset.

    The keys are those of `PreviousReward`, and

    - ``previous_action`` float32 (A,): one-hot for Discrete; concatenated one-hots for MultiDiscrete; the
      flattened numbers for Box and MultiBinary.

    A recurrent policy then has actions and rewards in its memory, with any MultiInput policy (RL^2: Duan et
    al. 2016, arXiv:1611.02779, section 2.2).

    Args:
        env: an environment with a supported space (`check_spaces`).

    Raises:
        TypeError: if a space is not supported.
        ValueError: if the inner Dict already has one of the two keys.
    """

    def _added_spaces(self) -> dict[str, spaces.Box]:
        return {ACTION: _encoded_space(self.env.action_space), **super()._added_spaces()}

    def _added(self, action: Any, reward: Any) -> dict[str, np.ndarray]:
        encoded = np.asarray(spaces.flatten(self.env.action_space, action), dtype=np.float32)
        return {ACTION: encoded, **super()._added(action, reward)}


def _encoded_space(action_space: spaces.Space) -> spaces.Box:
    flat = with_zero(spaces.flatten_space(action_space))
    assert isinstance(flat, spaces.Box)  # true for every space that check_spaces accepts
    return spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32), dtype=np.float32)


DONE = "previous_done"
"""Key of the flag that the previous step ended an episode."""


class PreviousTransition(PreviousStep):
    """`PreviousStep` that persists across episodes and adds a done flag: the input of an RL^2 agent.

    The first observation of an episode has the last action and reward of the previous episode. An agent
    whose memory persists across episodes (``GTrXLPPO(persist_memory_across_episodes=True)``) thus observes
    final rewards.

    - ``previous_action``, ``previous_reward``: as in `PreviousStep`.
    - ``previous_done`` float32 (1,): 1 in the first observation of an episode that follows another, else 0.

    All are zeros at the first reset, at a reset with a seed, and at a reset in the middle of an episode.
    `rlxf.envs.make_vec_env` resets with a seed before each episode (`ActionReplay`). Therefore it refuses
    environments with this wrapper, and applies it around all others with ``previous_transition=True``.

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
