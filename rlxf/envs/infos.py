"""What a Gymnasium `VectorEnv` says about one of its environments."""

from typing import Any

import numpy as np


def info_of(infos: dict[str, Any], i: int) -> dict[str, Any]:
    """The info of environment i out of a batch's ``infos``.

    Gymnasium keeps one array per key and, under ``"_" + key``, a mask (N,) of the environments that gave it.
    A key without a mask is the batch's own and is left out.
    """
    given = [key for key in infos if f"_{key}" in infos and infos[f"_{key}"][i]]
    return {key: _entry(infos[key], i) for key in given}


def row_of(batch: Any, i: int) -> Any:
    """A copy of row i of a batch of observations: an array, or a dict of arrays."""
    if isinstance(batch, dict):
        return {key: row_of(value, i) for key, value in batch.items()}
    row = batch[i]
    return {key: np.array(value) for key, value in row.items()} if isinstance(row, dict) else np.array(row)


def _entry(value: Any, i: int) -> Any:
    if isinstance(value, dict):
        return info_of(value, i)
    return value[i].item() if isinstance(value[i], np.generic) else value[i]
