"""Checks of the values that environments return: finite numbers, bounds, shapes and types."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, unwrap_vec_wrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from rlxf.data.spaces import FLAT, discrete_sizes, discrete_start, parts_by_key, parts_of, tolerant_bounds
from rlxf.envs.gym_api import checked_reset
from rlxf.envs.spaces import observation_parts
from rlxf.envs.vector import GymnasiumVecEnv, innermost_env
from rlxf.envs.wrappers import OwnLastObservation
from rlxf.utils.errors import FaultyEnvironmentError
from rlxf.utils.warnings import warn_user


def check_finite(what: str, values: VecEnvObs, step: int, environments: Sequence[int] | None = None) -> None:
    """Raise unless every number is finite.

    Args:
        what: name of the values in the message, for example "observation".
        values: one row for each environment, or a dict or tuple of such arrays.
        step: number of steps that each environment has taken.
        environments: index of the environment of each row; None for 0, 1, 2 ...

    Raises:
        FaultyEnvironmentError: with the environment, the step and the first NaN or infinite number.
    """
    if isinstance(values, Mapping | tuple):
        for key, part in values.items() if isinstance(values, Mapping) else enumerate(values):
            check_finite(f"{what} {key!r}", part, step, environments)
        return
    values = np.asarray(values)
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    environment, value = _first(values, ~np.isfinite(values), environments)
    raise FaultyEnvironmentError(
        f"{what} of environment {environment} is not finite at its step {step}: {value}; correct the "
        f"environment, or wrap it"
    )


def _first(rows: np.ndarray, faulty: np.ndarray, environments: Sequence[int] | None) -> tuple[int, str]:
    """Return the environment of the first faulty value in rows (N, ...), and the value with its index."""
    row, *index = (int(i) for i in np.argwhere(faulty)[0])
    place = f" at index {index}" if index else ""
    return row if environments is None else environments[row], f"{rows[row, *index]}{place}"


REUSED_ENDS = 3
"""Number of last observations that must equal first ones before a warning."""
_REUSED: WeakKeyDictionary[VecEnv, float] = WeakKeyDictionary()
"""Number of such observations of each vector environment; infinite when no more are compared."""


def may_reuse_arrays(env: VecEnv) -> bool:
    """Return whether the last observations of environments are still to be compared."""
    return _REUSED.get(env, 0) < math.inf


def warn_of_reused_arrays(env: VecEnv, before: Any, last: Any, first: Any) -> None:
    """Warn once if an environment seems to reuse its array, so that its reset replaces the last observation.

    This happens in other processes, which send the array after the reset. The observations of the first
    truncated episodes are compared. Those that the last step did not change show nothing, and a difference
    ends the comparison.

    Args:
        env: source of the observations.
        before: observations (N, ...) before the last step of N truncated episodes.
        last: their last observations.
        first: the first observations of the next episodes.
    """
    same = _equal_rows(last, first)
    moved = ~_equal_rows(before, last)
    _REUSED[env] = _REUSED.get(env, 0) + (same & moved).sum() if same.all() else math.inf
    if REUSED_ENDS <= _REUSED[env] < math.inf:
        _REUSED[env] = math.inf
        warn_user(
            f"the last observations of {REUSED_ENDS} truncated episodes equal the first ones of the next "
            f"episodes, whose values then replace the later rewards: if the environment reuses the array of "
            f"its observation, return a copy of it in reset and step"
        )


def _equal_rows(one: Any, other: Any) -> NDArray[np.bool_]:
    """Return whether rows (N, ...) of observations are equal in all parts, (N,)."""
    others = observation_parts(other)
    pairs = [(part, others[key]) for key, part in observation_parts(one).items()]
    return np.all([np.isclose(a, b, rtol=1e-6, atol=0).reshape(len(a), -1).all(1) for a, b in pairs], axis=0)


def check_shapes(space: spaces.Space[Any], values: VecEnvObs, step: int) -> None:
    """Raise unless a batch of observations has the shapes of its space.

    Args:
        space: space of one observation.
        values: one row for each environment, or a dict of such arrays.
        step: number of steps that each environment has taken.

    Raises:
        FaultyEnvironmentError: with both shapes.
    """
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            check_shapes(part, values[key], step)  # type: ignore[call-overload]
        return
    shape = np.shape(values)[1:]  # type: ignore[arg-type]
    if isinstance(space, spaces.Box) and shape != space.shape:
        raise FaultyEnvironmentError(
            f"observations at step {step} have shape {shape}, but their space {space} has shape "
            f"{space.shape}; correct the environment, or wrap it"
        )


def check_casts(space: spaces.Space[Any], values: VecEnvObs, step: int) -> None:
    """Raise unless a batch of observations keeps its values in the dtype of its space.

    Rounding to another floating-point dtype is allowed.

    Args:
        space: space of one observation.
        values: one row for each environment, or a dict of such arrays.
        step: number of steps that each environment has taken.

    Raises:
        FaultyEnvironmentError: with the first value that another one would replace.
    """
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            check_casts(part, values[key], step)  # type: ignore[call-overload]
        return
    dtype, array = space.dtype, np.asarray(values)
    if not isinstance(space, FLAT) or dtype is None or array.dtype == dtype or dtype.kind == "f":
        return
    with np.errstate(invalid="ignore"):
        changed = array.astype(dtype) != array
    if changed.any():
        raise FaultyEnvironmentError(
            f"observations at step {step} are of {array.dtype}, and {array[changed][0]} cannot be stored as "
            f"{dtype} of their space {space}; correct the space of the environment, or of a wrapper around it"
        )


_Limits = dict[Any, tuple[np.ndarray, np.ndarray]]
_LIMITS: WeakKeyDictionary[VecEnv, _Limits] = WeakKeyDictionary()
"""Limits of each part of the observations, for each vector environment; empty after its warning."""


def warn_outside(
    env: VecEnv,
    space: spaces.Space[Any],
    observations: Any,
    step: int,
    environments: Sequence[int] | None = None,
) -> None:
    """Warn once per vector environment, at its first observation outside a bounded Box.

    Args:
        env: source of the observations. Of stacked frames whose order is not certain, none is checked.
        space: space of one observation; of a Dict, only the parts that are a Box are checked.
        observations: one row for each environment, or a dict of such arrays.
        step: number of steps that each environment has taken.
        environments: index of the environment of each row; None for 0, 1, 2 ...
    """
    if env not in _LIMITS:
        _LIMITS[env] = _limits_of(space, unwrap_vec_wrapper(env, VecFrameStack))
    for key, (low, high) in _LIMITS[env].items():
        rows = observations if key is None else observations[key]
        inside = (rows >= low) & (rows <= high)
        if not inside.all():
            _LIMITS[env] = {}
            environment, value = _first(rows, ~inside, environments)
            name, part = ("", space) if key is None else (f" {key!r}", space[key])  # type: ignore[index]
            warn_user(
                f"observation{name} of environment {environment} at its step {step} is {value}, outside of "
                f"its space {part}; correct the bounds of the space, or clip the observation. Later ones are "
                f"not reported"
            )
            return


def _limits_of(space: spaces.Space[Any], stack: VecFrameStack | None) -> _Limits:
    """Return the bounds with tolerance of each bounded Box, by the key of a Dict, or None.

    With a ``VecFrameStack``, 0 is within the bounds, since it fills the frames before an episode with zeros.
    Parts whose order of frames is not certain are left out: those of nested stacks, and those that a wrapper
    around it changes.

    Args:
        space: space of one observation.
        stack: the outermost ``VecFrameStack``; None without it.
    """
    boxes = _boxes(space)
    limits = {key: _tolerant_bounds(box) for key, box in boxes.items() if not is_whole_range(box)}
    if stack is None:
        return limits
    if unwrap_vec_wrapper(stack.venv, VecFrameStack) is not None:
        return {}
    stacked, frames = _boxes(stack.observation_space), stack.stacked_obs
    parts = getattr(frames, "sub_stacked_observations", {None: frames})  # the first is that of a Dict
    return {
        key: (np.minimum(_in_order(low, parts[key]), 0), np.maximum(_in_order(high, parts[key]), 0))
        for key, (low, high) in limits.items()
        if boxes[key] == stacked.get(key)
    }


def _boxes(space: spaces.Space[Any]) -> dict[Any, spaces.Box]:
    """Return each Box of a Dict by its key; a space that is a Box itself has the key None."""
    return {key: part for key, part in parts_by_key(space).items() if isinstance(part, spaces.Box)}


def _tolerant_bounds(space: spaces.Box) -> tuple[np.ndarray, np.ndarray]:
    low, high = tolerant_bounds(space)
    dtype = space.dtype if space.dtype.kind == "f" else np.float64
    return low.astype(dtype), high.astype(dtype)


def _in_order(bound: np.ndarray, stack: Any) -> np.ndarray:
    """Return the bounds "a b a b" of concatenated frames, for which SB3 has "a a b b"."""
    last = np.moveaxis(bound, stack.repeat_axis, -1)
    frames = last.reshape(*last.shape[:-1], -1, stack.n_stack).swapaxes(-1, -2)
    return np.moveaxis(frames.reshape(last.shape), -1, stack.repeat_axis)


def is_whole_range(space: "spaces.Box[Any]") -> bool:
    """Return whether the space contains all values of its dtype, as uint8 images and unbounded spaces do."""
    if space.dtype.kind in "iu":
        limits = np.iinfo(space.dtype)
        return bool((space.low == limits.min).all() and (space.high == limits.max).all())
    return space.dtype.kind == "b" or not (space.bounded_below | space.bounded_above).any()


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
        self._raise_if("first observation", observation_fault(self.observation_space, observation))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment.

        Raises:
            FaultyEnvironmentError: if ``step`` does not have the interface of Gymnasium, the observation does
                not fit its space, the reward is not a number, or a done flag is neither true nor false.
        """
        observation, reward, terminated, truncated, info = super().step(action)
        self.__dict__["_steps"] += 1  # `__setattr__` would take as long as a simple environment
        self._raise_if("observation", observation_fault(self.observation_space, observation))
        if not isinstance(reward, float):
            self._raise_if("reward", _number_fault(reward, "biuf", "a number"))
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                self._raise_if(name, _number_fault(flag, "biu", "True or False"))
        return observation, reward, terminated, truncated, info

    def _raise_if(self, what: str, fault: str | None) -> None:
        if fault is not None:
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
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _parts_fault(space, observation)
    if isinstance(space, spaces.Discrete) and type(observation) in (int, np.int64):
        return None if 0 <= observation - space.start < space.n else range_fault(space, observation)
    if not isinstance(space, FLAT):
        return None
    has_dtype = type(observation) is np.ndarray and observation.dtype == space.dtype
    fault = None if has_dtype and observation.shape == space.shape else _cast_fault(space, observation)
    return fault or range_fault(space, observation)


def range_fault(space: spaces.Space[Any], values: Any) -> str | None:
    """Describe an invalid value of a Discrete, MultiDiscrete or MultiBinary space; None if there is none.

    Args:
        space: space of one observation; the result is None for all other spaces.
        values: integers of the shape of the space, or a batch of them.
    """
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
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
