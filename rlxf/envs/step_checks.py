"""Checks of the values that single environments return: observations of their space, numbers and flags."""

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from rlxf.data.spaces import FLAT, DiscreteSpace, discrete_sizes, discrete_start, parts_of
from rlxf.envs.gym_api import checked_reset
from rlxf.envs.vector import GymnasiumVecEnv, innermost_env
from rlxf.envs.wrappers import OwnLastObservation
from rlxf.utils.errors import FaultyEnvironmentError

BOOLEANS = bool, np.bool_


class CheckedSteps(OwnLastObservation):
    """Wrapper that raises FaultyEnvironmentError if an environment returns invalid values.

    It checks the shape and dtype of observations, the range of discrete and binary values, and that rewards
    and done flags are single numbers. It accepts values outside a Box, about which `warn_outside` warns.
    Attributes are read from, and set in, the environment, so ``set_attr`` of a vector environment has the
    same effect as without the wrapper.

    Args:
        env: the environment, with all its other wrappers.
        index: index of the environment, for the error message.
    """

    _own = frozenset(
        {
            "env",
            "_index",
            "_steps",
            "_resets",
            "_checked_space",
            "_action_space",
            "_observation_space",
            "_metadata",
            "_cached_spec",
        }
    )
    """Attributes of the wrapper itself."""

    def __init__(self, env: gymnasium.Env, index: int = 0):
        super().__init__(env)
        self._index = index
        self._steps = self._resets = 0
        self._checked_space = env.observation_space  # a wrapper asks all environments inside it

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # unpickling looks up attributes before env is set
            raise AttributeError(name)
        return getattr(self.env, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            super().__setattr__(name, value)
        else:
            setattr(self.env, name, value)

    def set_wrapper_attr(self, name: str, value: Any, **options: Any) -> bool:
        """Set the attribute in the environment, like `gymnasium.Wrapper.set_wrapper_attr`."""
        return self.env.set_wrapper_attr(name, value, **options)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment.

        Raises:
            FaultyEnvironmentError: if ``reset`` does not have the interface of Gymnasium, or the observation
                does not fit its space.
        """
        self._resets += 1
        observation, info = checked_reset(self.env, **options)
        self._checked_space = self.observation_space
        if fault := observation_fault(self._checked_space, observation):
            self._raise("first observation", fault)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment.

        Raises:
            FaultyEnvironmentError: if ``step`` does not have the interface of Gymnasium, the observation does
                not fit its space, the reward is not a number, or a done flag is neither true nor false.
        """
        observation, reward, terminated, truncated, info = super().step(action)
        self.__dict__["_steps"] += 1  # `__setattr__` would take as long as a simple environment
        if fault := observation_fault(self._checked_space, observation):
            self._raise("observation", fault)
        if not isinstance(reward, float) and (fault := _number_fault(reward, "biuf", "a number")):
            self._raise("reward", fault)
        if not (isinstance(terminated, BOOLEANS) and isinstance(truncated, BOOLEANS)):
            self._check_flags(terminated=terminated, truncated=truncated)
        return observation, reward, terminated, truncated, info

    def _check_flags(self, **flags: Any) -> None:
        for name, flag in flags.items():
            if fault := _number_fault(flag, "biu", "True or False"):
                self._raise(name, fault)

    def _raise(self, what: str, fault: str) -> NoReturn:
        raise FaultyEnvironmentError(
            f"{what} of environment {self._index} at its step {self._steps} {fault}; correct the "
            f"environment, or wrap it"
        )


def with_checked_steps(env: gymnasium.Env | VecEnv) -> Any:
    """Wrap a single environment, or each environment of a vector environment in place, in `CheckedSteps`.

    Of vector environments, this applies to `DummyVecEnv` and `SyncVectorEnv`. Others are returned unchanged:
    they stack the results of their environments, so errors remain visible in the batch.
    """
    if isinstance(env, gymnasium.Env):
        return CheckedSteps(env)
    inner = innermost_env(env)
    if isinstance(inner, DummyVecEnv | SyncVectorEnv):
        inner.envs = [
            each if isinstance(each, CheckedSteps) else CheckedSteps(each, index)
            for index, each in enumerate(inner.envs)
        ]
    return env


def count_calls(env: VecEnv) -> int:
    """Return a number that differs after further steps or resets of the environments.

    Those of a ``VectorEnv``, and of environments in `CheckedSteps`, are counted. Those in the processes of
    ``SubprocVecEnv`` and `Workers` are not.
    """
    inner = env.unwrapped
    calls = inner.calls if isinstance(inner, GymnasiumVecEnv) else 0
    checked = [each for each in getattr(innermost_env(env), "envs", ()) if isinstance(each, CheckedSteps)]
    return calls + sum(each._steps + each._resets for each in checked)


def observation_fault(space: spaces.Space[Any], observation: Any) -> str | None:
    """Describe how the shape, dtype or values of an observation violate its space; None if they do not.

    A different dtype is allowed if it can be cast with NumPy's "same_kind" rule, such as float64 or integers
    to float32, but not floats to integers. Integers that fit into an integer dtype are allowed, too. Values
    may exceed the bounds of a Box.
    """
    if type(space) is spaces.Box and _has_form(space, observation):  # the most frequent case
        return None
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _parts_fault(space, observation)
    if isinstance(space, spaces.Discrete) and type(observation) in (int, np.int64):
        return None if 0 <= observation - space.start < space.n else range_fault(space, observation)
    if not isinstance(space, FLAT):
        return None
    fault = None if _has_form(space, observation) else _cast_fault(space, observation)
    return fault or range_fault(space, observation)


def _has_form(space: spaces.Space[Any], observation: Any) -> bool:
    """Return whether an observation is an array of the dtype and shape of its space."""
    is_array = type(observation) is np.ndarray
    return is_array and observation.dtype == space.dtype and observation.shape == space.shape


def range_fault(space: spaces.Space[Any], values: Any) -> str | None:
    """Describe an invalid value of a Discrete, MultiDiscrete or MultiBinary space; None if there is none.

    Args:
        space: space of one observation; the result is None for all other spaces.
        values: integers of the shape of the space, or a batch of them.
    """
    if not isinstance(space, DiscreteSpace):
        return None
    array = np.asarray(values)
    start = discrete_start(space)
    outside = (array < start) | (array >= start + discrete_sizes(space).reshape(space.shape))
    return f"holds {array[outside][0]}, which is not in its space {space}" if outside.any() else None


def _parts_fault(space: spaces.Dict | spaces.Tuple, observation: Any) -> str | None:
    is_dict = isinstance(space, spaces.Dict)
    if not isinstance(observation, Mapping if is_dict else tuple | list):
        return f"is {_abbreviated(observation)}, not a {'dict' if is_dict else 'tuple'}"
    present = observation if is_dict else range(len(observation))
    for key, part in parts_of(space).items():
        if key not in present:
            return f"lacks the part {key!r}"
        if fault := observation_fault(part, observation[key]):
            return f"in its part {key!r} {fault}"
    return None


def _cast_fault(space: Any, observation: Any) -> str | None:
    array = _as_array(observation)
    if array is None:
        return f"is {_abbreviated(observation)}, not an array"
    if array.dtype.kind not in "biuf":
        return f"is {_abbreviated(observation)}, not numbers of {space.dtype}"
    if array.shape != space.shape:
        return f"has shape {array.shape}, but its space {space} has shape {space.shape}"
    is_castable = np.can_cast(array.dtype, space.dtype or np.float32, "same_kind")
    if not is_castable and not _integers_fit(array, space.dtype):
        return f"is of {array.dtype}, which cannot be cast to {space.dtype} of its space without loss"
    return None


def _integers_fit(array: np.ndarray, dtype: Any) -> bool:
    """Return whether integers fit into a different integer dtype, such as small int64 values into uint8."""
    if array.dtype.kind not in "iu" or dtype.kind not in "iu" or not array.size:
        return False
    limits = np.iinfo(dtype)
    return bool(array.min() >= limits.min and array.max() <= limits.max)


def _number_fault(value: Any, kinds: str, expected: str) -> str | None:
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    array = _as_array(value.detach().cpu() if is_tensor else value)
    if array is None or array.dtype.kind not in kinds or array.ndim:
        return f"is {_abbreviated(value)}, not {expected}"
    return None


def _as_array(value: Any) -> np.ndarray | None:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _abbreviated(value: Any) -> str:
    text = repr(value)
    return f"{text[:80]}{'...' * (len(text) > 80)} ({type(value).__name__})"
