"""Checks of the results of an environment, before a vector environment casts them to its arrays.

`DummyVecEnv` writes observations, rewards and done flags into preallocated arrays. Without an error, it
broadcasts an observation of shape (1,) to (3,), and casts the reward "1" to 1.0 and the flag None to False.
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
    """Wrapper that raises FaultyEnvironmentError if an environment returns invalid values.

    It checks the shape and dtype of observations, the range of discrete and binary values, and that rewards
    and done flags are single numbers. It accepts values outside a Box: `rlxf.envs.bounds` warns about them.
    Attributes of the environment can be read through the wrapper.

    Args:
        env: the environment, in all its other wrappers.
        number: index of the environment, for the error message.
    """

    def __init__(self, env: gymnasium.Env, number: int = 0):
        super().__init__(env)
        self._number, self._steps = number, 0

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # unpickling looks up attributes before env is set
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
        self._raise_if("first observation", observation_fault(self.observation_space, observation))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment.

        Raises:
            FaultyEnvironmentError: if the observation does not fit its space, the reward is not a number, or
                a done flag is neither true nor false.
        """
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        self._raise_if("observation", observation_fault(self.observation_space, observation))
        if not isinstance(reward, float):
            self._raise_if("reward", _number_fault(reward, "biuf", "a number"))
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, _FLAGS):
                self._raise_if(name, _number_fault(flag, "biu", "True or False"))
        return observation, reward, terminated, truncated, info

    def _raise_if(self, what: str, fault: str | None) -> None:
        if fault is not None:
            raise FaultyEnvironmentError(
                f"{what} of environment {self._number} at its step {self._steps} {fault}; correct the "
                f"environment, or wrap it"
            )


def with_checked_steps(env: gymnasium.Env | VecEnv) -> Any:
    """Wrap a single environment, or each environment of a vector environment in place, in `CheckedSteps`.

    Of vector environments, this applies to `DummyVecEnv` and `SyncVectorEnv`. Others are returned unchanged:
    they stack the results of their environments, so errors remain visible in the batch.
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
    """Describe how the shape, dtype or values of an observation violate its space; None if they do not.

    Another dtype is allowed if it can be cast with NumPy's "same_kind" rule, such as float64 or integers to
    float32, but not floats to integers. Integers that fit into an integer dtype are allowed, too. Values may
    exceed the bounds of a Box.
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
    """Describe an invalid value of a Discrete, MultiDiscrete or MultiBinary space; None if there is none.

    Args:
        space: space of one observation; the result is None for all other spaces.
        values: integers of the shape of the space, or a batch of them.
    """
    if isinstance(space, spaces.Discrete):
        low, high = np.asarray(space.start), np.asarray(space.start + space.n - 1)
    elif isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    elif isinstance(space, spaces.MultiBinary):
        low, high = np.asarray(0), np.asarray(1)
    else:
        return None
    array = np.asarray(values)
    outside = (array < low) | (array > high)
    return f"holds {array[outside][0]}, which is not in its space {space}" if outside.any() else None


def _parts_fault(space: spaces.Dict | spaces.Tuple, observation: Any) -> str | None:
    is_dict = isinstance(space, spaces.Dict)
    if not isinstance(observation, Mapping if is_dict else tuple | list):
        return f"is {_abbreviated(observation)}, not a {'dict' if is_dict else 'tuple'}"
    present = observation if is_dict else range(len(observation))
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
        return f"is {_abbreviated(observation)}, not an array"
    if array.dtype.kind not in "biuf":
        return f"is {_abbreviated(observation)}, not numbers of {space.dtype}"
    if array.shape != space.shape:
        return _shape_fault(space, array.shape)
    if not np.can_cast(array.dtype, space.dtype or np.float32, "same_kind") and not _integers_fit(
        array, space.dtype
    ):
        return f"is of {array.dtype}, which cannot be cast to {space.dtype} of its space without loss"
    return None


def _integers_fit(array: np.ndarray, dtype: Any) -> bool:
    """Return whether integers fit into another integer dtype, such as small int64 values into uint8."""
    if array.dtype.kind not in "iu" or dtype.kind not in "iu" or not array.size:
        return False
    limits = np.iinfo(dtype)
    return bool(array.min() >= limits.min and array.max() <= limits.max)


def _number_fault(value: Any, kinds: str, expected: str) -> str | None:
    array = _array_of(value)
    if array is None or array.dtype.kind not in kinds or array.ndim:
        return f"is {_abbreviated(value)}, not {expected}"
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


def _abbreviated(value: Any) -> str:
    text = repr(value)
    return f"{text[:80]}{'...' * (len(text) > 80)} ({type(value).__name__})"
