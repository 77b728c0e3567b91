"""Checks of the values of vector environments: finite numbers, bounds, shapes, types and reused arrays."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, unwrap_vec_wrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from rlxf.data.spaces import FLAT, parts_by_key, tolerant_bounds
from rlxf.envs.spaces import observation_parts
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
