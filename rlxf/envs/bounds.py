"""Warning of observations outside of the bounds of their space.

Gymnasium's own checker warns, too, and many environments slightly exceed their bounds. So it is no error.
"""

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

TOLERANCE = 1e-4
"""Share of a bound, at least of 1, by which a number may exceed it because of rounding."""

_Limits = dict[Any, tuple[np.ndarray, np.ndarray]]
_LIMITS: WeakKeyDictionary[VecEnv, _Limits] = WeakKeyDictionary()
"""Limits of each part of the observations; empty after the warning was given."""


def warn_outside(
    env: VecEnv,
    space: spaces.Space[Any],
    observations: Any,
    step: int,
    environments: Sequence[int] | None = None,
) -> None:
    """Warn, once for each vector environment, of the first observation outside of a bounded Box.

    Args:
        env: source of the observations.
        space: of one of them; of a Dict, only the parts that are a Box are checked.
        observations: one row for each environment, or a dict of such arrays.
        step: steps that each environment has taken.
        environments: number of the environment of each row; None for 0, 1, 2 ...
    """
    if env not in _LIMITS:
        _LIMITS[env] = _limits_of(space)
    for key, (low, high) in _LIMITS[env].items():
        rows = observations if key is None else observations[key]
        inside = (rows >= low) & (rows <= high)
        if not inside.all():
            row, *place = (int(i) for i in np.argwhere(~inside)[0])
            _LIMITS[env] = {}
            number = row if environments is None else environments[row]
            named = space if key is None else space[key]  # type: ignore[index]
            _warn(named, key, number, step, place, rows[row, *place])
            return


def _warn(space: spaces.Space[Any], key: Any, number: int, step: int, place: list[int], value: Any) -> None:
    part = "" if key is None else f" {key!r}"
    index = f" at index {place}" if place else ""
    warnings.warn(
        f"observation{part} of environment {number} at its step {step} is {value}{index}, outside of its "
        f"space {space}; correct the bounds of the space, or clip the observation. Later ones are not "
        f"reported",
        UserWarning,
        stacklevel=3,
    )


def _limits_of(space: spaces.Space[Any]) -> _Limits:
    if isinstance(space, spaces.Dict):
        boxes = {key: part for key, part in space.items() if isinstance(part, spaces.Box)}
        return {key: limits for key, part in boxes.items() for limits in _limits_of(part).values()}
    if not isinstance(space, spaces.Box) or _is_whole_range(space):
        return {}
    slack = [TOLERANCE * np.maximum(1, np.abs(bound.astype(np.float64))) for bound in (space.low, space.high)]
    low, high = space.low - slack[0], space.high + slack[1]
    return {None: (low.astype(_compared(space)), high.astype(_compared(space)))}


def _compared(space: spaces.Box[Any]) -> Any:
    return space.dtype if space.dtype.kind == "f" else np.float64


def _is_whole_range(space: spaces.Box[Any]) -> bool:
    """Return True if all values of the dtype are inside, as in images of bytes and unbounded spaces."""
    if space.dtype.kind in "iu":
        limits = np.iinfo(space.dtype)
        return bool((space.low == limits.min).all() and (space.high == limits.max).all())
    return space.dtype.kind == "b" or not (space.bounded_below | space.bounded_above).any()
