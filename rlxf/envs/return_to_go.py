"""The return that is asked for, as part of the observation."""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from rlxf.envs.errors import FaultyEnvironmentError
from rlxf.envs.trajectories.encoders import observation_encoder
from rlxf.envs.trajectories.errors import RowError
from rlxf.envs.trajectories.flatten import first_choice

Space = spaces.Space[Any]
KEYS = ("observation", "return_to_go", "previous_action", "time_step")


class ReturnToGo(VecEnvWrapper):
    r"""Observations say what return is still wanted: an agent that reads them can be asked for one.

    The observation becomes a Dict of

    - ``observation``: that of ``venv``; a Dict or a Tuple as one vector (`shown_space`).
    - ``return_to_go`` float32 (1,): ``G_0 = target_return``, ``G_(t+1) = G_t - r_t`` (Chen et al. 2021,
      arXiv:2106.01345, section 3), in units of the rewards of ``venv``; counted in float64.
    - ``previous_action``: as it was given to ``step``; at the start of an episode zeros, or what choices are
      counted from.
    - ``time_step`` int64 (1,): steps since the start of the episode, from 0.

    Where an episode ends all of them start anew; ``info["terminal_observation"]`` has them as they were then.
    A filler row (`GymnasiumVecEnv`) is no step: behind it an episode is at its start.

    Args:
        venv: the environments. No ``VecNormalize`` may scale their rewards: the scaled ones are not what was
            asked for.
        target_return: G_0, one number for all environments or one for each, (E,).

    Raises:
        ValueError: if a target is not finite, there are not E of them, ``venv`` is wrapped so already, or a
            ``VecNormalize`` scales its rewards.
        TypeError: if the observation is a Dict or a Tuple with parts that no vector holds.
    """

    def __init__(self, venv: VecEnv, target_return: float | ArrayLike):
        if is_return_conditioned(venv.observation_space):
            raise ValueError(f"{venv} shows a return to go already: set its target_return instead")
        normalizer = unwrap_vec_normalize(venv)
        if normalizer is not None and normalizer.norm_reward:
            raise ValueError("VecNormalize scales the rewards: set its norm_reward=False to ask for a return")
        self._inner = venv.observation_space
        shown = shown_space(self._inner)
        self._encode = None if shown is self._inner else observation_encoder(self._inner)
        super().__init__(venv, observation_space=_conditioned(shown, venv.action_space))
        self.target_return = target_return
        self._return_to_go = self._target.copy()
        self._time_step = np.zeros(self.num_envs, np.int64)
        self._none_before = first_choice(self.action_space)
        self._previous = np.zeros((self.num_envs, *_shape(self.action_space)), self.action_space.dtype)

    @property
    def target_return(self) -> NDArray[np.float64]:
        """float64 (E,): what episodes that begin from now on are asked for. Set it to one number or to E."""
        return self._target.copy()

    @target_return.setter
    def target_return(self, target: float | ArrayLike) -> None:
        values = np.asarray(target, np.float64)
        if values.shape not in ((), (self.num_envs,)) or not np.isfinite(values).all():
            wanted = f"a finite number or {self.num_envs} of them, one for each environment"
            raise ValueError(f"target_return must be {wanted}, got {target!r}")
        self._target = np.broadcast_to(values, (self.num_envs,)).copy()

    def reset(self) -> dict[str, NDArray[Any]]:
        """First observations of all environments."""
        observations = self.venv.reset()
        self._restart(np.ones(self.num_envs, np.bool_))
        return self._joined(self._shown(observations))

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep the actions, (E, ...), and give them on."""
        self._taken = np.array(actions, self._previous.dtype).reshape(self._previous.shape)
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments; see the class for what comes back."""
        observations, rewards, dones, infos = self.venv.step_wait()
        self._return_to_go -= rewards
        self._time_step += 1
        self._previous = self._taken
        for i in np.flatnonzero(dones).tolist():
            self._add_to_last(infos[i], i)
        self._restart(dones | np.array([info.get("filler", False) for info in infos], np.bool_))
        return self._joined(self._shown(observations)), rewards, dones, infos

    def _restart(self, rows: NDArray[np.bool_]) -> None:
        self._return_to_go[rows] = self._target[rows]
        self._time_step[rows] = 0
        self._previous[rows] = self._none_before

    def _shown(self, observations: Any) -> NDArray[Any]:
        if self._encode is None:
            return observations
        try:
            return self._encode(observations)
        except RowError as error:
            raise FaultyEnvironmentError(
                f"the observation of environment {error.row} {error.fault}"
            ) from error

    def _joined(self, observations: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Copies: what was given out does not change with the next step."""
        return {
            "observation": observations,
            "return_to_go": self._return_to_go[:, None].astype(np.float32),
            "previous_action": self._previous.copy(),
            "time_step": self._time_step[:, None].copy(),
        }

    def _add_to_last(self, info: dict[str, Any], row: int) -> None:
        if "terminal_observation" in info:
            last = info["terminal_observation"]
            shown = last if self._encode is None else self._encode(_batch_of_one(last))[0]
            added = {key: value[row] for key, value in self._joined(shown).items() if key != "observation"}
            info["terminal_observation"] = {"observation": shown, **added}


def shown_space(observation_space: Space) -> Space:
    """The space of ``observation`` in a `ReturnToGo`: the inner one; for a Dict or a Tuple that of a vector.

    The vector, float32, is what `observation_encoder` of the inner space makes: its parts flattened one after
    the other. So ``observation_encoder(shown_space(space))`` encodes what is shown, whatever the space.

    Raises:
        TypeError: if a part cannot be flattened.
    """
    if not isinstance(observation_space, spaces.Dict | spaces.Tuple):
        return observation_space
    return spaces.Box(-np.inf, np.inf, observation_encoder(observation_space).shape, np.float32)


def is_return_conditioned(observation_space: Space) -> bool:
    """Whether this is the space of a `ReturnToGo`."""
    return isinstance(observation_space, spaces.Dict) and set(observation_space) == set(KEYS)


def _conditioned(shown: Space, action_space: Space) -> spaces.Dict:
    parts = (
        shown,
        spaces.Box(-np.inf, np.inf, (1,), np.float32),
        _with_zero(action_space),
        spaces.Box(0, np.inf, (1,), np.int64),
    )
    return spaces.Dict(dict(zip(KEYS, parts, strict=True)))


def _with_zero(action_space: Space) -> Space:
    """The space itself, or a Box stretched to hold the zeros of a start."""
    if not isinstance(action_space, spaces.Box) or action_space.contains(np.zeros_like(action_space.low)):
        return action_space
    low, high = np.minimum(action_space.low, 0), np.maximum(action_space.high, 0)
    return spaces.Box(low, high, dtype=action_space.dtype)


def _shape(space: Space) -> tuple[int, ...]:
    return space.shape or ()


def _batch_of_one(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {key: _batch_of_one(part) for key, part in observation.items()}
    if isinstance(observation, tuple):
        return tuple(map(_batch_of_one, observation))
    return np.asarray(observation)[None]
