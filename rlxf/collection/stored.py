"""How observations are stored: floats as float32, all else as it is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlxf.envs.trajectories.parts import FLAT


def stored_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """The space of what `stack` makes of the observations of ``space``: float64 becomes float32.

    Raises:
        TypeError: if a part is text of a kind that Minari cannot keep.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: stored_space(part) for key, part in space.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(map(stored_space, space))
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    if not isinstance(space, (*FLAT, spaces.Text)):
        raise TypeError(
            f"Minari keeps no {space}: make it a gymnasium.spaces.Text, or leave it out with "
            f"gymnasium.wrappers.FilterObservation"
        )
    return space


def stack(observations: Sequence[Any]) -> Any:
    """T observations as an array (T, ...), nested as they are, text as a list; float64 as float32."""
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
    """The first of the T stacked observations that holds NaN or infinity; None if there is none."""
    if isinstance(rows, dict):
        rows = tuple(rows.values())
    if not isinstance(rows, tuple):
        return _first_bad(np.asarray(rows))
    return min((row for row in map(first_bad, rows) if row is not None), default=None)


def _first_bad(rows: NDArray[Any]) -> int | None:
    if rows.dtype.kind != "f":
        return None
    good = np.isfinite(rows.reshape(len(rows), -1)).all(axis=1)
    return None if good.all() else int(np.argmin(good))
