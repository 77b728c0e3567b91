"""Values that would poison the network are stopped where they come in."""

from collections.abc import Mapping, Sequence

import numpy as np
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from rlxf.envs.errors import FaultyEnvironmentError


def check_finite(what: str, values: VecEnvObs, step: int, environments: Sequence[int] | None = None) -> None:
    """Raise unless every number is finite.

    Args:
        what: what the values are, for the message.
        values: one row for each environment, or several such arrays by name.
        step: step of the environments since training began.
        environments: number of the environment of each row; None for 0, 1, 2 ...

    Raises:
        FaultyEnvironmentError: naming the environment, the step and the value.
    """
    if isinstance(values, Mapping):
        for key, part in values.items():
            check_finite(f"{what} {key!r}", part, step, environments)
        return
    values = np.asarray(values)
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    row = int(np.argwhere(~np.isfinite(values))[0][0])
    environment = row if environments is None else environments[row]
    raise FaultyEnvironmentError(
        f"{what} of environment {environment} is not finite at its step {step}: "
        f"{values[row]}; training stopped, nothing was learned from it"
    )
