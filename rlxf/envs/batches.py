"""Batches of observations and infos of several environments: rows, concatenation and comparison."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs
from stable_baselines3.common.vec_env.util import dict_to_obs, obs_space_info

LOST, BROKEN = "Workers.lost", "Workers.broken"
"""Keys of infos: True in each step lost to a failed environment; the cause, in the first of these steps."""


def is_filler(infos: Sequence[dict[str, Any]]) -> NDArray[np.bool_]:
    """Return the mask of the environments whose step is a filler row, bool (N,); see `GymnasiumVecEnv`."""
    return np.array([info.get("filler", False) for info in infos], np.bool_)


def info_of(infos: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the info of environment i from the ``infos`` of a batch.

    Gymnasium keeps one array per key and, under ``"_" + key``, a mask (N,) of the environments that set it.
    A key without a mask belongs to the whole batch and is left out.
    """
    keys = [key for key in infos if f"_{key}" in infos and infos[f"_{key}"][i]]
    return {key: _entry(infos[key], i) for key in keys}


def row_of(batch: Any, i: int) -> Any:
    """Return a copy of row i of a batch of observations: an array, a string, or a dict or tuple of these."""
    return _map_parts(batch, lambda part: _copy(part[i]))


def rows_of(batch: Any, rows: NDArray[np.int64]) -> Any:
    """Return the selected rows (N,) of a batch of observations, nested like the batch."""
    return _map_parts(
        batch, lambda part: tuple(part[i] for i in rows) if isinstance(part, tuple) else part[rows]
    )


def batch_of_one(observation: Any) -> Any:
    """Return an observation as a batch with one row, arrays (1, ...), nested like the observation."""
    return _map_parts(observation, lambda part: np.asarray(part)[None])


def concatenate_observations(rows: Sequence[Any]) -> VecEnvObs:
    """Concatenate the observations (1, ...) of N environments to a batch (N, ...)."""
    if isinstance(rows[0], dict):
        return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
    if isinstance(rows[0], tuple):
        return tuple(np.concatenate(part) for part in zip(*rows, strict=True))
    return np.concatenate(rows)


def observation_parts(observation: VecEnvObs) -> dict[str, np.ndarray]:
    """Return the arrays of an observation by the key of a Dict, the index in a Tuple, or ""."""
    if isinstance(observation, dict | tuple):
        items = observation.items() if isinstance(observation, dict) else enumerate(observation)
        return {str(key): part for key, part in items}
    return {"": observation}


def observation_from_parts(space: spaces.Space[Any], parts: Mapping[str, np.ndarray]) -> VecEnvObs:
    """Return the observation of a space from its `observation_parts`."""
    keys, *_ = obs_space_info(space)
    return dict_to_obs(space, {key: parts["" if key is None else str(key)] for key in keys})


def observations_equal(one: Any, other: Any) -> bool:
    """Return whether two batches of observations, arrays or dicts of arrays, are equal."""
    if isinstance(one, dict):
        return isinstance(other, dict) and all(
            observations_equal(part, other.get(key)) for key, part in one.items()
        )
    return np.array_equal(one, other)


def _map_parts(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to each part of a batch. Gymnasium batches strings as a tuple of strings, one part."""
    if isinstance(batch, dict):
        return {key: _map_parts(part, function) for key, part in batch.items()}
    if isinstance(batch, tuple) and not all(isinstance(entry, str) for entry in batch):
        return tuple(_map_parts(part, function) for part in batch)
    return function(batch)


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
