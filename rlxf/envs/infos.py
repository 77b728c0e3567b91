"""What a batch of environments shows and says about some of them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

LOST, BROKEN = "Workers.lost", "Workers.broken"
"""Said of a step that nobody played since an environment broke; and, of the first such one, why it did."""


def info_of(infos: dict[str, Any], i: int) -> dict[str, Any]:
    """The info of environment i out of a batch's ``infos``.

    Gymnasium keeps one array per key and, under ``"_" + key``, a mask (N,) of the environments that gave it.
    A key without a mask is the batch's own and is left out.
    """
    given = [key for key in infos if f"_{key}" in infos and infos[f"_{key}"][i]]
    return {key: _entry(infos[key], i) for key in given}


def row_of(batch: Any, i: int) -> Any:
    """A copy of row i of a batch of observations: an array, a string, or a dict or tuple of these."""
    if isinstance(batch, dict):
        return {key: row_of(value, i) for key, value in batch.items()}
    if _is_tuple_of_parts(batch):
        return tuple(row_of(part, i) for part in batch)
    return _copied(batch[i])


def rows_of(batch: Any, rows: NDArray[np.int64]) -> Any:
    """The chosen rows (N,) of a batch of observations, nested as the batch is."""
    if isinstance(batch, dict):
        return {key: rows_of(part, rows) for key, part in batch.items()}
    if _is_tuple_of_parts(batch):
        return tuple(rows_of(part, rows) for part in batch)
    return tuple(batch[i] for i in rows) if isinstance(batch, tuple) else batch[rows]


def _is_tuple_of_parts(batch: Any) -> bool:
    """Whether each entry is a batch; Gymnasium batches strings as a tuple of them."""
    return isinstance(batch, tuple) and not all(isinstance(entry, str) for entry in batch)


def _copied(row: Any) -> Any:
    if isinstance(row, dict):
        return {key: _copied(part) for key, part in row.items()}
    if isinstance(row, tuple):
        return tuple(map(_copied, row))
    return row if isinstance(row, str) else np.array(row)


def _entry(value: Any, i: int) -> Any:
    if isinstance(value, dict):
        return info_of(value, i)
    return value[i].item() if isinstance(value[i], np.generic) else value[i]
