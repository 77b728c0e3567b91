"""Checks of the results of an environment, before a vector environment casts them to its arrays.

`DummyVecEnv` writes observations, rewards and ends into arrays of its own: an observation of shape (1,) is
broadcast to (3,), the reward "1" becomes 1.0 and the end None becomes False, without an error.
"""

import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from rlxf.envs.errors import FaultyEnvironmentError
from rlxf.envs.trajectories.parts import FLAT, parts_of
from rlxf.envs.vector import GymnasiumVecEnv

_FLAGS = (bool, np.bool_)


class CheckedSteps(gymnasium.Wrapper):
    """Raise FaultyEnvironmentError if an environment returns invalid values.

    It checks the shape and dtype of observations, that choices and bits are among those of their space, and
    that rewards and ends are single numbers. It accepts values outside of a Box: `rlxf.envs.bounds` warns of
    them. Attributes of the environment can be read through the wrapper.

    Args:
        env: the environment, in all its other wrappers.
        number: of the environment, for the error.
    """

    def __init__(self, env: gymnasium.Env, number: int = 0):
        super().__init__(env)
        self._number, self._steps = number, 0

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # while it is unpickled, there is none yet
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]  # as in `gymnasium.Wrapper`
        """Spec of the wrapped environment, which creates an equal environment."""
        return self.env.spec

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment.

        Raises:
            FaultyEnvironmentError: if the observation does not fit its space.
        """
        observation, info = self.env.reset(**options)
        self._refuse("first observation", observation_fault(self.observation_space, observation))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment.

        Raises:
            FaultyEnvironmentError: if the observation does not fit its space, the reward is no number, or an
                end is neither true nor false.
        """
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        self._refuse("observation", observation_fault(self.observation_space, observation))
        if not isinstance(reward, float):
            self._refuse("reward", _number_fault(reward, "biuf", "a number"))
        for name, end in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(end, _FLAGS):
                self._refuse(name, _number_fault(end, "biu", "True or False"))
        return observation, reward, terminated, truncated, info

    def _refuse(self, what: str, fault: str | None) -> None:
        if fault is not None:
            raise FaultyEnvironmentError(
                f"{what} of environment {self._number} at its step {self._steps} {fault}; correct the "
                f"environment, or wrap it"
            )


def with_checked_steps(env: gymnasium.Env | VecEnv) -> Any:
    """Return a single environment in `CheckedSteps`; of a vector environment, wrap each one in place.

    This applies to a `DummyVecEnv` and a `SyncVectorEnv`. Others are returned unchanged: they stack the
    results of their environments, so errors remain visible in the batch.
    """
    if isinstance(env, gymnasium.Env):
        return CheckedSteps(env)
    inner: Any = env.unwrapped
    inner = inner.env.unwrapped if isinstance(inner, GymnasiumVecEnv) else inner
    if isinstance(inner, DummyVecEnv | SyncVectorEnv):
        inner.envs = [
            each if isinstance(each, CheckedSteps) else CheckedSteps(each, number)
            for number, each in enumerate(inner.envs)
        ]
    return env


def observation_fault(space: spaces.Space[Any], observation: Any) -> str | None:
    """Describe how the shape, dtype or choices of an observation violate its space; None if they do not.

    Numbers of another dtype are allowed where they can be cast without loss of kind: float64 for float32, or
    whole numbers for float32, but no real numbers for whole ones. Values of a Box may be outside of it.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _parts_fault(space, observation)
    if not isinstance(space, FLAT):
        return None
    if type(observation) is np.ndarray and observation.dtype == space.dtype:
        fault = None if observation.shape == space.shape else _shape_fault(space, observation.shape)
    else:
        fault = _cast_fault(space, observation)
    return fault or range_fault(space, observation)


def range_fault(space: spaces.Space[Any], values: Any) -> str | None:
    """Describe an invalid choice of a Discrete or MultiDiscrete space, or bit of a MultiBinary one.

    Args:
        space: of one observation; any other has no such values.
        values: whole numbers of the shape of the space, or a batch of them.
    """
    if isinstance(space, spaces.Discrete):
        least, most = np.asarray(space.start), np.asarray(space.start + space.n - 1)
    elif isinstance(space, spaces.MultiDiscrete):
        least, most = space.start, space.start + space.nvec - 1
    elif isinstance(space, spaces.MultiBinary):
        least, most = np.asarray(0), np.asarray(1)
    else:
        return None
    array = np.asarray(values)
    outside = (array < least) | (array > most)
    return f"holds {array[outside][0]}, which is not in its space {space}" if outside.any() else None


def _parts_fault(space: spaces.Dict | spaces.Tuple, observation: Any) -> str | None:
    keyed = isinstance(space, spaces.Dict)
    if not isinstance(observation, Mapping if keyed else tuple | list):
        return f"is {_shown(observation)}, not a {'dict' if keyed else 'tuple'}"
    present = observation if keyed else range(len(observation))
    for key, part in parts_of(space).items():
        if key not in present:
            return f"lacks the part {key!r}"
        fault = observation_fault(part, observation[key])
        if fault is not None:
            return f"in its part {key!r} {fault}"
    return None


def _cast_fault(space: Any, observation: Any) -> str | None:
    try:
        array = np.asarray(observation)
    except (TypeError, ValueError, RuntimeError):
        return f"is {_shown(observation)}, not an array"
    if array.dtype.kind not in "biuf":
        return f"is {_shown(observation)}, not numbers of {space.dtype}"
    if array.shape != space.shape:
        return _shape_fault(space, array.shape)
    if not np.can_cast(array.dtype, space.dtype or np.float32, "same_kind") and not _whole_within(
        array, space.dtype
    ):
        return f"is of {array.dtype}, which cannot be cast to {space.dtype} of its space without loss"
    return None


def _whole_within(array: np.ndarray, dtype: Any) -> bool:
    """Return True if whole numbers fit into an integer type, such as small int64 values into uint8."""
    if array.dtype.kind not in "iu" or dtype.kind not in "iu" or not array.size:
        return False
    limits = np.iinfo(dtype)
    return bool(array.min() >= limits.min and array.max() <= limits.max)


def _number_fault(value: Any, kinds: str, wanted: str) -> str | None:
    array = _array_of(value)
    if array is None or array.dtype.kind not in kinds or array.ndim:
        return f"is {_shown(value)}, not {wanted}"
    return None


def _array_of(value: Any) -> np.ndarray | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shape_fault(space: spaces.Space[Any], shape: tuple[int, ...]) -> str:
    return f"has shape {shape}, but its space {space} has shape {space.shape}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:80]}{'...' * (len(text) > 80)} ({type(value).__name__})"
