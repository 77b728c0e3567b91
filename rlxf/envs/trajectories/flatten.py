"""Gymnasium's rule for flattening, for many values at once."""

from collections.abc import Iterable
from functools import singledispatch
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlxf.envs.trajectories.errors import RowError

Rows = NDArray[np.float32]


@singledispatch
def flatten_rows(space: spaces.Space[Any], values: Any) -> Rows:
    """float32 (n, D): row i is ``gymnasium.spaces.flatten(space, value i)``, with a Dict's keys sorted.

    Box and MultiBinary: the numbers in a row. Discrete and each part of a MultiDiscrete: one-hot. Dict and
    Tuple: their parts one after the other. Gymnasium sorts the keys of a Dict that is made of a ``dict``,
    others it takes as they come; Minari sorts all. Rows have to mean the same in data and environment.

    Args:
        space: a Box, Discrete, MultiDiscrete, MultiBinary, or Dict or Tuple of these, nested at will.
        values: an array (n, ...); for Dict a dict of them, for Tuple a tuple.

    Raises:
        TypeError: if the space is of another class.
        RowError: if a value lies outside of a Discrete or MultiDiscrete.
    """
    raise TypeError(f"{space} cannot be flattened to one vector; leave it out with a wrapper")


@flatten_rows.register(spaces.Box)
@flatten_rows.register(spaces.MultiBinary)
def _numbers(space: spaces.Box[Any] | spaces.MultiBinary, values: Any) -> Rows:
    array = np.asarray(values)
    with np.errstate(over="ignore"):  # too large for float32 becomes infinite, which is found later
        return array.reshape(len(array), -1).astype(np.float32)


@flatten_rows.register(spaces.Discrete)
def _one_hot(space: spaces.Discrete[Any], values: Any) -> Rows:
    return np.eye(int(space.n), dtype=np.float32)[counted(space, values)[:, 0]]


@flatten_rows.register(spaces.MultiDiscrete)
def _one_hots(space: spaces.MultiDiscrete[Any], values: Any) -> Rows:
    columns = counted(space, values).T
    parts = [np.eye(n, dtype=np.float32)[column] for n, column in zip(space.nvec.flat, columns, strict=True)]
    return np.concatenate(parts, axis=1)


@flatten_rows.register(spaces.Dict)
def _dict(space: spaces.Dict, values: Any) -> Rows:
    return _joined(flatten_rows(space.spaces[key], values[key]) for key in sorted(space.spaces))


@flatten_rows.register(spaces.Tuple)
def _tuple(space: spaces.Tuple, values: Any) -> Rows:
    return _joined(flatten_rows(part, value) for part, value in zip(space.spaces, values, strict=True))


@singledispatch
def unflatten_rows(space: spaces.Space[Any], rows: Rows) -> Any:
    """What `flatten_rows` made its rows of: an array (n, ...), for Dict a dict of them, for Tuple a tuple.

    Args:
        space: as there.
        rows: float32 (n, D).
    """
    raise TypeError(f"{space} cannot be flattened to one vector; leave it out with a wrapper")


@unflatten_rows.register(spaces.Box)
@unflatten_rows.register(spaces.MultiBinary)
def _back_to_numbers(space: spaces.Box[Any] | spaces.MultiBinary, rows: Rows) -> NDArray[Any]:
    return rows.reshape(-1, *space.shape).astype(space.dtype)


@unflatten_rows.register(spaces.Discrete)
def _back_to_choice(space: spaces.Discrete[Any], rows: Rows) -> NDArray[Any]:
    return (rows.argmax(axis=1) + space.start).astype(space.dtype)


@unflatten_rows.register(spaces.MultiDiscrete)
def _back_to_choices(space: spaces.MultiDiscrete[Any], rows: Rows) -> NDArray[Any]:
    parts = np.split(rows, np.cumsum(space.nvec.ravel())[:-1], axis=1)
    choices = np.stack([part.argmax(axis=1) for part in parts], axis=1) + space.start.ravel()
    return choices.reshape(-1, *space.shape).astype(space.dtype)


@unflatten_rows.register(spaces.Dict)
def _back_to_dict(space: spaces.Dict, rows: Rows) -> dict[str, Any]:
    parts = dict(sorted(space.spaces.items()))
    own = zip(parts.items(), _split(rows, parts.values()), strict=True)
    return {key: unflatten_rows(part, columns) for (key, part), columns in own}


@unflatten_rows.register(spaces.Tuple)
def _back_to_tuple(space: spaces.Tuple, rows: Rows) -> tuple[Any, ...]:
    parts = zip(space.spaces, _split(rows, space.spaces), strict=True)
    return tuple(unflatten_rows(part, own) for part, own in parts)


def counted(space: spaces.Discrete[Any] | spaces.MultiDiscrete[Any], values: Any) -> NDArray[np.int64]:
    """int64 (n, D): the choices counted from 0, D = 1 for Discrete.

    Raises:
        RowError: if one of them is not in the space.
    """
    array = np.asarray(values)
    array = array.reshape(len(array), -1)
    sizes = np.ravel(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n)
    choices = array.astype(np.int64) - np.ravel(space.start)
    inside = ((choices >= 0) & (choices < sizes) & (array == array.astype(np.int64))).all(axis=1)
    if not inside.all():
        row = int(np.argmin(inside))
        raise RowError(row, f"is {array[row].tolist()}, outside of {space}")
    return choices


def _joined(parts: Any) -> Rows:
    return np.concatenate(list(parts), axis=1)


def _split(rows: Rows, parts: Iterable[spaces.Space[Any]]) -> list[Rows]:
    """The rows (n, D) of each part."""
    return np.split(rows, np.cumsum([spaces.flatdim(part) for part in parts])[:-1], axis=1)
