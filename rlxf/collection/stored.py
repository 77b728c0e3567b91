"""Storage format of observations: float64 is stored as float32, all else is unchanged."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlxf.envs.trajectories.parts import FLAT


def stored_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of the stored observations (`stack`), in which float64 becomes float32.

    Raises:
        TypeError: if Minari does not support a part, such as text that is not a ``gymnasium.spaces.Text``.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: stored_space(part) for key, part in space.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(map(stored_space, space))
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    if not isinstance(space, (*FLAT, spaces.Text)):
        raise TypeError(
            f"Minari does not support the space {space}: convert it to a gymnasium.spaces.Text, or remove it "
            f"with gymnasium.wrappers.FilterObservation"
        )
    return space


def stack(observations: Sequence[Any]) -> Any:
    """Stack T observations to an array (T, ...), nested like them; text to a list; float64 to float32."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: stack([observation[key] for observation in observations]) for key in first}
    if isinstance(first, tuple):
        return tuple(map(stack, zip(*observations, strict=True)))
    if isinstance(first, str):
        return list(observations)
    rows = np.stack(observations)
    return rows.astype(np.float32) if rows.dtype == np.float64 else rows


def first_bad(rows: Any) -> int | None:
    """Return the index of the first of T stacked observations with NaN or infinity, or None."""
    if isinstance(rows, dict):
        rows = tuple(rows.values())
    if not isinstance(rows, tuple):
        return _first_bad(np.asarray(rows))
    return min((row for row in map(first_bad, rows) if row is not None), default=None)


def _first_bad(rows: NDArray[Any]) -> int | None:
    if rows.dtype.kind != "f":
        return None
    finite = np.isfinite(rows.reshape(len(rows), -1)).all(axis=1)
    return None if finite.all() else int(np.argmin(finite))
