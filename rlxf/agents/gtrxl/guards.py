"""Values that would poison the network are stopped where they come in."""

from collections.abc import Mapping

import numpy as np


def check_finite(what: str, values: np.ndarray | Mapping[str, np.ndarray], step: int) -> None:
    """Raise unless every number is finite.

    Args:
        what: what the values are, for the message.
        values: one row for each environment, or several such arrays by name.
        step: step of the environments since training began.

    Raises:
        ValueError: naming the environment, the step and the value.
    """
    if isinstance(values, Mapping):
        for key, part in values.items():
            check_finite(f"{what} {key!r}", part, step)
        return
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    environment = int(np.argwhere(~np.isfinite(values))[0][0])
    raise ValueError(
        f"{what} of environment {environment} is not finite at its step {step}: "
        f"{values[environment]}; training stopped, nothing was learned from it"
    )
