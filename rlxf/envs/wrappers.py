"""Wrappers that add the return-to-go, the time step or the previous transition to the observation."""

from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from numpy.typing import ArrayLike, NDArray
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from rlxf.data.encoders import observation_encoder
from rlxf.data.spaces import discrete_start
from rlxf.envs.gym_api import check_info, raise_interface_error, reset_env
from rlxf.envs.infos import is_filler
from rlxf.envs.spaces import batch_of_one, check_spaces
from rlxf.utils.errors import FaultyEnvironmentError, RowError

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
    flat = _with_zero(spaces.flatten_space(action_space))
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


Space = spaces.Space[Any]
KEYS = ("observation", "return_to_go", "previous_action", "time_step")
"""Keys of the observations of `ReturnToGo`."""


class ReturnToGo(VecEnvWrapper):
    r"""Wrapper that conditions the observations on a target return, as a Decision Transformer needs it.

    The observation becomes a Dict of

    - ``observation``: that of ``venv``; a Dict or a Tuple is flattened to one vector
      (`encoded_observation_space`).
    - ``return_to_go`` float32 (1,): ``G_0 = target_return``, ``G_(t+1) = G_t - r_t`` (Chen et al. 2021,
      arXiv:2106.01345, section 3), in units of the rewards of ``venv``; accumulated in float64.
    - ``previous_action``: the last action passed to ``step``. At the start of an episode it is zero, or the
      ``start`` of a Discrete or MultiDiscrete space.
    - ``time_step`` int64 (1,): steps since the start of the episode, from 0.

    When an episode ends, all of them restart, and ``info["terminal_observation"]`` has their last values.
    A reset step (`GymnasiumVecEnv`) is part of no episode: after it, the episode is at its start.

    Args:
        venv: the environments. Their rewards must not be scaled by a ``VecNormalize``, because the target is
            in raw units.
        target_return: G_0, one number for all environments or one for each, (E,).

    Raises:
        ValueError: if a target is not finite, the number of targets is neither 1 nor E, ``venv`` is already
            conditioned on a return, or a ``VecNormalize`` scales its rewards.
        TypeError: if ``venv`` is not a VecEnv, or the observation is a Dict or a Tuple with parts that cannot
            be flattened.
    """

    def __init__(self, venv: VecEnv, target_return: float | ArrayLike):
        _check_vec_env(venv)
        if is_return_conditioned(venv.observation_space):
            raise ValueError(f"the observations of {venv} already have a return-to-go: set its target_return")
        normalizer = unwrap_vec_normalize(venv)
        if normalizer is not None and normalizer.norm_reward:
            raise ValueError(
                "a target return is in units of raw rewards, but VecNormalize scales the rewards: set its "
                "norm_reward=False"
            )
        self._inner = venv.observation_space
        encoded = encoded_observation_space(self._inner)
        self._encode = None if encoded is self._inner else observation_encoder(self._inner)
        super().__init__(venv, observation_space=_conditioned(encoded, venv.action_space))
        self.target_return = target_return
        self._return_to_go = self._target.copy()
        self._time_step = np.zeros(self.num_envs, np.int64)
        self._initial_action = discrete_start(self.action_space)
        self._previous = np.zeros((self.num_envs, *(self.action_space.shape or ())), self.action_space.dtype)

    @property
    def target_return(self) -> NDArray[np.float64]:
        """Target return of episodes that start from now on, float64 (E,). Set it to one number or to E."""
        return self._target.copy()

    @target_return.setter
    def target_return(self, target: float | ArrayLike) -> None:
        values = np.asarray(target, np.float64)
        if values.shape not in ((), (self.num_envs,)) or not np.isfinite(values).all():
            allowed = f"a finite number or {self.num_envs} of them, one for each environment"
            raise ValueError(f"target_return must be {allowed}, got {target!r}")
        self._target = np.broadcast_to(values, (self.num_envs,)).copy()

    def reset(self) -> dict[str, NDArray[Any]]:
        """Return the first observations of all environments."""
        observations = self.venv.reset()
        self._restart(np.ones(self.num_envs, np.bool_))
        return self._with_condition(self._encoded(observations))

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep a copy of the actions, (E, ...), and pass them on."""
        self._actions = np.array(actions, self._previous.dtype).reshape(self._previous.shape)
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments; the class docstring describes the results."""
        observations, rewards, dones, infos = self.venv.step_wait()
        self._return_to_go -= rewards
        self._time_step += 1
        self._previous = self._actions
        for i in np.flatnonzero(dones).tolist():
            self._add_to_last(infos[i], i)
        self._restart(dones | is_filler(infos))
        return self._with_condition(self._encoded(observations)), rewards, dones, infos

    def _restart(self, rows: NDArray[np.bool_]) -> None:
        self._return_to_go[rows] = self._target[rows]
        self._time_step[rows] = 0
        self._previous[rows] = self._initial_action

    def _encoded(self, observations: Any) -> NDArray[Any]:
        if self._encode is None:
            return observations
        try:
            return self._encode(observations)
        except RowError as error:
            raise FaultyEnvironmentError(
                f"the observation of environment {error.row} {error.fault}"
            ) from error

    def _with_condition(self, observations: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return the observations with copies of the state, so later steps do not change them."""
        return {
            "observation": observations,
            "return_to_go": self._return_to_go[:, None].astype(np.float32),
            "previous_action": self._previous.copy(),
            "time_step": self._time_step[:, None].copy(),
        }

    def _add_to_last(self, info: dict[str, Any], row: int) -> None:
        if "terminal_observation" in info:
            last = info["terminal_observation"]
            encoded = last if self._encode is None else self._encode(batch_of_one(last))[0]
            state = self._with_condition(encoded)
            added = {key: value[row] for key, value in state.items() if key != "observation"}
            info["terminal_observation"] = {"observation": encoded, **added}


def _check_vec_env(venv: Any) -> None:
    """Raise TypeError unless ``venv`` is a VecEnv; the message has the conversion of other environments."""
    if isinstance(venv, VecEnv):
        return
    given = f"got {type(venv).__name__}"
    if isinstance(venv, VectorEnv):
        raise TypeError(f"ReturnToGo needs a VecEnv, {given}: pass rlxf.envs.as_vec_env(env)")
    raise TypeError(
        f"ReturnToGo needs a VecEnv, {given}: pass rlxf.envs.make_vec_env(ID_OR_FUNCTION, n_envs), for an "
        f"existing environment make_vec_env(lambda: env, 1)"
    )


def encoded_observation_space(observation_space: Space) -> Space:
    """Return the space of ``observation`` in a `ReturnToGo`: the inner space; a vector for a Dict or Tuple.

    The float32 vector is the output of `observation_encoder` of the inner space: its flattened parts,
    concatenated. For any space, ``observation_encoder(encoded_observation_space(space))`` encodes this
    observation.

    Raises:
        TypeError: if a part cannot be flattened.
    """
    if not isinstance(observation_space, spaces.Dict | spaces.Tuple):
        return observation_space
    return spaces.Box(-np.inf, np.inf, observation_encoder(observation_space).shape, np.float32)


def is_return_conditioned(observation_space: Space) -> bool:
    """Return whether this is the observation space of a `ReturnToGo`."""
    return isinstance(observation_space, spaces.Dict) and set(observation_space) == set(KEYS)


def _conditioned(observation_space: Space, action_space: Space) -> spaces.Dict:
    parts = {
        "observation": observation_space,
        "return_to_go": spaces.Box(-np.inf, np.inf, (1,), np.float32),
        "previous_action": _with_zero(action_space),
        "time_step": spaces.Box(0, np.inf, (1,), np.int64),
    }
    return spaces.Dict(parts)


def _with_zero(action_space: Space) -> Space:
    """Return the space, or a Box extended to contain the zeros at the start of an episode."""
    if not isinstance(action_space, spaces.Box) or action_space.contains(np.zeros_like(action_space.low)):
        return action_space
    low, high = np.minimum(action_space.low, 0), np.maximum(action_space.high, 0)
    return spaces.Box(low, high, dtype=action_space.dtype)
