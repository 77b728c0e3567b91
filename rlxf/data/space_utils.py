"""Parts of nested spaces and flat vectors of their values."""

import math
from functools import singledispatch
from typing import Any

import numpy as np
from gymnasium import spaces
from minari.dataset.minari_storage import is_image_space as is_minari_image
from numpy.typing import NDArray
from stable_baselines3.common.preprocessing import is_image_space

from rlxf.data.errors import RowError

Space = spaces.Space[Any]
FLAT = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Supported spaces that are not nested."""


def is_image(space: Space) -> bool:
    """Return whether the space is a uint8 Box from 0 to 255 with three axes, or with two of at least 32."""
    return is_image_space(space) or is_minari_image(space)


def is_text(space: Space) -> bool:
    """Return whether the values are strings, as of Gymnasium's Text or MiniGrid's missions."""
    return space.dtype is not None and np.issubdtype(space.dtype, np.str_)


def parts_of(space: spaces.Dict | spaces.Tuple) -> dict[Any, Space]:
    """Return the parts of a Dict by their sorted keys, or those of a Tuple by their indices."""
    return dict(sorted(space.spaces.items())) if isinstance(space, spaces.Dict) else dict(enumerate(space))


def encoded_parts(space: spaces.Dict | spaces.Tuple) -> dict[Any, Space]:
    """Return the parts of a space that are encoded, which are all except those that contain only text."""
    return {key: part for key, part in parts_of(space).items() if not is_text_only(part)}


def is_text_only(space: Space) -> bool:
    """Return whether a space contains only text."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return not encoded_parts(space)
    return is_text(space)


def encoded_width(space: Space) -> int:
    """Return the width of the encoded row of a space, without its text.

    Raises:
        ValueError: if Gymnasium cannot flatten it.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(map(encoded_width, encoded_parts(space).values()))
    return spaces.flatdim(space)


def text_paths(space: Space, where: str) -> list[str]:
    """Return the paths of the parts of a space that are text, in the form ``where['key']``."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = parts_of(space).items()
        return [text for key, part in parts for text in text_paths(part, f"{where}[{key!r}]")]
    return [where] if is_text(space) else []


Rows = NDArray[np.float32]
BRIGHTEST = np.float32(255)
"""Largest value of a pixel."""


@singledispatch
def flatten_rows(space: spaces.Space[Any], values: Any) -> Rows:
    """Flatten n values to float32 (n, D); row i is ``gymnasium.spaces.flatten(space, value i)``.

    Box and MultiBinary are flattened. Discrete and each component of MultiDiscrete become one-hot. The parts
    of Dict and Tuple are concatenated. There are three differences from Gymnasium:

    - **Keys** of a Dict are sorted, so that rows are equal in dataset and environment. Minari sorts all keys;
      Gymnasium sorts them only if the Dict was made from a ``dict``.
    - **Images** (`is_image`) are scaled to [0, 1].
    - **Text** in a Dict or a Tuple is left out.

    Args:
        space: a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these, arbitrarily nested.
        values: an array (n, ...), for Dict a dict of arrays, for Tuple a tuple of arrays. Text is ignored.

    Raises:
        TypeError: if the space is of another class.
        RowError: if a value is outside of a Discrete or MultiDiscrete.
    """
    raise TypeError(f"{space} cannot be flattened to a vector; remove it with a wrapper")


@flatten_rows.register(spaces.Box)
@flatten_rows.register(spaces.MultiBinary)
def _numbers(space: spaces.Box[Any] | spaces.MultiBinary, values: Any) -> Rows:
    array = np.asarray(values)
    with np.errstate(over="ignore"):  # values too large for float32 become infinite and are detected later
        rows = array.reshape(len(array), -1).astype(np.float32)
    return rows / BRIGHTEST if is_image(space) else rows


@flatten_rows.register(spaces.Discrete)
def _one_hot(space: spaces.Discrete[Any], values: Any) -> Rows:
    return _as_one_hot(discrete_indices(space, values)[:, 0], int(space.n))


@flatten_rows.register(spaces.MultiDiscrete)
def _one_hots(space: spaces.MultiDiscrete[Any], values: Any) -> Rows:
    columns = discrete_indices(space, values).T
    return np.concatenate(list(map(_as_one_hot, columns, space.nvec.flat)), axis=1)


def _as_one_hot(choices: NDArray[np.int64], size: int) -> Rows:
    """Encode (n,) as one-hot (n, size), without an identity matrix, whose memory is quadratic in the size."""
    rows = np.zeros((len(choices), size), np.float32)
    rows[np.arange(len(choices)), choices] = 1
    return rows


@flatten_rows.register(spaces.Dict)
@flatten_rows.register(spaces.Tuple)
def _parts(space: spaces.Dict | spaces.Tuple, values: Any) -> Rows:
    return np.concatenate(
        [flatten_rows(part, values[key]) for key, part in encoded_parts(space).items()], axis=1
    )


@singledispatch
def unflatten_rows(space: spaces.Space[Any], rows: Rows) -> Any:
    """Invert `flatten_rows`: return an array (n, ...), for Dict a dict of arrays, for Tuple a tuple.

    Args:
        space: as in `flatten_rows`, without text.
        rows: float32 (n, D).

    Raises:
        TypeError: if the space is of another class, or contains text.
    """
    raise TypeError(f"{space} cannot be flattened to a vector; remove it with a wrapper")


@unflatten_rows.register(spaces.Box)
@unflatten_rows.register(spaces.MultiBinary)
def _unflatten_numbers(space: spaces.Box[Any] | spaces.MultiBinary, rows: Rows) -> NDArray[Any]:
    numbers = np.rint(rows * BRIGHTEST) if is_image(space) else rows
    return numbers.reshape(-1, *space.shape).astype(space.dtype)


@unflatten_rows.register(spaces.Discrete)
def _unflatten_discrete(space: spaces.Discrete[Any], rows: Rows) -> NDArray[Any]:
    return (rows.argmax(axis=1) + space.start).astype(space.dtype)


@unflatten_rows.register(spaces.MultiDiscrete)
def _unflatten_multi_discrete(space: spaces.MultiDiscrete[Any], rows: Rows) -> NDArray[Any]:
    parts = np.split(rows, np.cumsum(space.nvec.ravel())[:-1], axis=1)
    choices = np.stack([part.argmax(axis=1) for part in parts], axis=1) + space.start.ravel()
    return choices.reshape(-1, *space.shape).astype(space.dtype)


@unflatten_rows.register(spaces.Dict)
def _unflatten_dict(space: spaces.Dict, rows: Rows) -> dict[str, Any]:
    return _unflatten_parts(space, rows)


@unflatten_rows.register(spaces.Tuple)
def _unflatten_tuple(space: spaces.Tuple, rows: Rows) -> tuple[Any, ...]:
    return tuple(_unflatten_parts(space, rows).values())


def discrete_indices(
    space: spaces.Discrete[Any] | spaces.MultiDiscrete[Any] | spaces.MultiBinary, values: Any
) -> NDArray[np.int64]:
    """Convert discrete values to indices counted from 0, int64 (n, D); D is 1 for Discrete.

    Raises:
        RowError: if a value is not in the space.
    """
    array = np.asarray(values)
    array = array.reshape(len(array), -1)
    choices = array.astype(np.int64) - np.ravel(discrete_start(space))
    sizes = discrete_sizes(space)
    inside = ((choices >= 0) & (choices < sizes) & (array == array.astype(np.int64))).all(axis=1)
    if not inside.all():
        row = int(np.argmin(inside))
        raise RowError(row, f"is {array[row].tolist()}, outside of {space}")
    return choices


def discrete_sizes(
    space: spaces.Discrete[Any] | spaces.MultiDiscrete[Any] | spaces.MultiBinary,
) -> NDArray[np.int64]:
    """Return the number of values of each discrete component, int64 (D,); D is 1 for Discrete."""
    if isinstance(space, spaces.MultiBinary):
        return np.full(math.prod(space.shape), 2)
    return np.ravel(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n).astype(np.int64)


def discrete_start(space: spaces.Space[Any]) -> Any:
    """Return the smallest discrete value, in the shape of the space; 0 for spaces without a start."""
    return getattr(space, "start", 0)


def _unflatten_parts(space: spaces.Dict | spaces.Tuple, rows: Rows) -> dict[Any, Any]:
    parts = parts_of(space)
    columns = np.split(rows, np.cumsum([encoded_width(part) for part in parts.values()])[:-1], axis=1)
    pairs = zip(parts.items(), columns, strict=True)
    return {key: unflatten_rows(part, part_rows) for (key, part), part_rows in pairs}
