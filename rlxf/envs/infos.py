"""Observations and infos of single environments, taken from those of a batch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

LOST, BROKEN = "Workers.lost", "Workers.broken"
"""Keys of infos: True in each step lost to a failed environment; the cause, in the first of these steps."""


def info_of(infos: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the info of environment i from the ``infos`` of a batch.

    Gymnasium keeps one array per key and, under ``"_" + key``, a mask (N,) of the environments that set it.
    A key without a mask belongs to the whole batch and is left out.
    """
    keys = [key for key in infos if f"_{key}" in infos and infos[f"_{key}"][i]]
    return {key: _entry(infos[key], i) for key in keys}


def row_of(batch: Any, i: int) -> Any:
    """Return a copy of row i of a batch of observations: an array, a string, or a dict or tuple of these."""
    if isinstance(batch, dict):
        return {key: row_of(value, i) for key, value in batch.items()}
    if _is_tuple_of_parts(batch):
        return tuple(row_of(part, i) for part in batch)
    return _copy(batch[i])


def rows_of(batch: Any, rows: NDArray[np.int64]) -> Any:
    """Return the selected rows (N,) of a batch of observations, nested like the batch."""
    if isinstance(batch, dict):
        return {key: rows_of(part, rows) for key, part in batch.items()}
    if _is_tuple_of_parts(batch):
        return tuple(rows_of(part, rows) for part in batch)
    return tuple(batch[i] for i in rows) if isinstance(batch, tuple) else batch[rows]


def _is_tuple_of_parts(batch: Any) -> bool:
    """Return whether each entry is a batch. Gymnasium batches strings as a tuple of strings."""
    return isinstance(batch, tuple) and not all(isinstance(entry, str) for entry in batch)


def _copy(row: Any) -> Any:
    if isinstance(row, dict):
        return {key: _copy(part) for key, part in row.items()}
    if isinstance(row, tuple):
        return tuple(map(_copy, row))
    return row if isinstance(row, str) else np.array(row)


def _entry(value: Any, i: int) -> Any:
    if isinstance(value, dict):
        return info_of(value, i)
    return value[i].item() if isinstance(value[i], np.generic) else value[i]
