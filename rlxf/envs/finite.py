"""Checks that values from environments are finite and have the shapes of their space."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from rlxf.envs.errors import FaultyEnvironmentError


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
    row, *index = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
    environment = row if environments is None else environments[row]
    raise FaultyEnvironmentError(
        f"{what} of environment {environment} is not finite at its step {step}: "
        f"{values[row, *index]}{f' at index {index}' if index else ''}; correct the environment, or wrap it"
    )


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
