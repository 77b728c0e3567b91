"""How observations are stored: floats as float32, all else as it is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


def stored_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """The space of what `stack` makes of the observations of ``space``: float64 becomes float32."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: stored_space(part) for key, part in space.items()})
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    return space


def stack(observations: Sequence[Any]) -> Any:
    """T observations as an array (T, ...), or a dict of arrays; float64 as float32."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: stack([observation[key] for observation in observations]) for key in first}
    rows = np.stack(observations)
    return rows.astype(np.float32) if rows.dtype == np.float64 else rows


def first_bad(rows: Any) -> int | None:
    """The first of the T stacked observations that holds NaN or infinity; None if there is none."""
    parts = rows.values() if isinstance(rows, dict) else [rows]
    found = [first_bad(part) if isinstance(part, dict) else _first_bad(part) for part in parts]
    return min((row for row in found if row is not None), default=None)


def _first_bad(rows: NDArray[Any]) -> int | None:
    if rows.dtype.kind != "f":
        return None
    good = np.isfinite(rows.reshape(len(rows), -1)).all(axis=1)
    return None if good.all() else int(np.argmin(good))
