"""Wrapper that conditions the observations on a target return, for a Decision Transformer."""

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from numpy.typing import ArrayLike, NDArray
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from rlxf.data.encoders import observation_encoder
from rlxf.data.spaces import discrete_start
from rlxf.envs.infos import is_filler
from rlxf.envs.spaces import Space, batch_of_one, with_zero
from rlxf.utils.errors import FaultyEnvironmentError, RowError

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
        "previous_action": with_zero(action_space),
        "time_step": spaces.Box(0, np.inf, (1,), np.int64),
    }
    return spaces.Dict(parts)
