"""Warning about observations outside the bounds of their space.

It is not an error, because many environments slightly exceed their bounds. Gymnasium's checker warns, too.
"""

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

TOLERANCE = 1e-4
"""Relative tolerance for rounding: a value may exceed a bound b by ``TOLERANCE * max(1, |b|)``."""

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
        env: source of the observations.
        space: space of one observation; of a Dict, only the parts that are a Box are checked.
        observations: one row for each environment, or a dict of such arrays.
        step: number of steps that each environment has taken.
        environments: index of the environment of each row; None for 0, 1, 2 ...
    """
    if env not in _LIMITS:
        _LIMITS[env] = _limits_of(space)
    for key, (low, high) in _LIMITS[env].items():
        rows = observations if key is None else observations[key]
        inside = (rows >= low) & (rows <= high)
        if not inside.all():
            row, *index = (int(i) for i in np.argwhere(~inside)[0])
            _LIMITS[env] = {}
            environment = row if environments is None else environments[row]
            part = space if key is None else space[key]  # type: ignore[index]
            _warn(part, key, environment, step, index, rows[row, *index])
            return


def _warn(
    space: spaces.Space[Any], key: Any, environment: int, step: int, index: list[int], value: Any
) -> None:
    part = "" if key is None else f" {key!r}"
    place = f" at index {index}" if index else ""
    warnings.warn(
        f"observation{part} of environment {environment} at its step {step} is {value}{place}, outside of "
        f"its space {space}; correct the bounds of the space, or clip the observation. Later ones are not "
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
    return {None: (low.astype(_comparison_dtype(space)), high.astype(_comparison_dtype(space)))}


def _comparison_dtype(space: spaces.Box[Any]) -> Any:
    return space.dtype if space.dtype.kind == "f" else np.float64


def _is_whole_range(space: spaces.Box[Any]) -> bool:
    """Return whether the space contains all values of its dtype, as uint8 images and unbounded spaces do."""
    if space.dtype.kind in "iu":
        limits = np.iinfo(space.dtype)
        return bool((space.low == limits.min).all() and (space.high == limits.max).all())
    return space.dtype.kind == "b" or not (space.bounded_below | space.bounded_above).any()
