"""Nested spaces: their parts, and flat vectors of their values."""

import math
from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import numpy as np
from gymnasium import spaces
from minari.dataset.minari_storage import is_image_space as is_minari_image
from numpy.typing import NDArray
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import VecTransposeImage

from rlxf.utils.errors import RowError

Space = spaces.Space[Any]
DiscreteSpace = spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
FLAT = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Supported spaces that are not nested."""


def is_image(space: Space) -> bool:
    """Return whether the space is a uint8 Box from 0 to 255 with three axes, or with two of at least 32."""
    return is_image_space(space) or is_minari_image(space)


def is_text(space: Space) -> bool:
    """Return whether the values are strings, as in Gymnasium's Text or MiniGrid's missions."""
    return space.dtype is not None and np.issubdtype(space.dtype, np.str_)


def parts_of(space: spaces.Dict | spaces.Tuple) -> dict[Any, Space]:
    """Return the parts of a Dict by their sorted keys, or those of a Tuple by their indices."""
    return dict(sorted(space.spaces.items())) if isinstance(space, spaces.Dict) else dict(enumerate(space))


def parts_by_key(space: Space) -> dict[Any, Any]:
    """Return the parts of a Dict by their keys; any other space has the key None."""
    return dict(space.spaces) if isinstance(space, spaces.Dict) else {None: space}


def count_values(batch: Any) -> int:
    """Return the number of values in a batch of a space; a batch of strings is a tuple of them."""
    if isinstance(batch, dict):
        return count_values(next(iter(batch.values())))
    if isinstance(batch, tuple) and not isinstance(batch[0], str):
        return count_values(batch[0])
    return len(batch)


def leaves(space: Space, where: str = "") -> Iterator[tuple[str, Space]]:
    """Yield the parts of a space that are not nested, each with its path in the form ``where['key']``."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, part in parts_of(space).items():
            yield from leaves(part, f"{where}[{key!r}]")
    else:
        yield where, space


def is_text_only(space: Space) -> bool:
    """Return whether a space contains only text."""
    return all(is_text(leaf) for _, leaf in leaves(space))


def encoded_parts(space: spaces.Dict | spaces.Tuple) -> dict[Any, Space]:
    """Return the parts of a space that are encoded, which are all except those that contain only text."""
    return {key: part for key, part in parts_of(space).items() if not is_text_only(part)}


def encoded_width(space: Space) -> int:
    """Return the width of the encoded row of a space, without its text.

    Raises:
        ValueError: if Gymnasium cannot flatten it.
    """
    return sum(spaces.flatdim(leaf) for _, leaf in leaves(space) if not is_text(leaf))


def channels_first(space: spaces.Box, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images (n, ...) of an image space as (n, C, H, W); C is 1 for images without a channel axis.

    As in Stable-Baselines3, the smallest of three axes is the channel axis.
    """
    if images.ndim == 3:
        return images[:, None]
    return images if is_image_space_channels_first(space) else np.moveaxis(images, -1, 1)


def image_shape(space: spaces.Box) -> tuple[int, ...]:
    """Return the shape (C, H, W) of the images of a space, with channels first."""
    return channels_first(space, np.empty((1, *space.shape), np.uint8)).shape[1:]


def with_channels_first(space: Space) -> Space:
    """Return the space after SB3's ``VecTransposeImage``, which moves the channels of images to the front."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: with_channels_first(part) for key, part in space.items()})
    if is_image_space(space) and not is_image_space_channels_first(space):  # type: ignore[arg-type]
        return VecTransposeImage.transpose_space(space)  # type: ignore[arg-type]
    return space


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
        TypeError: if the space is of an unsupported class.
        RowError: if a value is outside of a Discrete or MultiDiscrete.
    """
    raise TypeError(f"{space} cannot be flattened to a vector; remove it with a wrapper")


@flatten_rows.register(spaces.Box)
@flatten_rows.register(spaces.MultiBinary)
def _flatten_numbers(space: spaces.Box | spaces.MultiBinary, values: Any) -> Rows:
    array = np.asarray(values)
    with np.errstate(over="ignore"):  # values too large for float32 become infinite and are detected later
        rows = array.reshape(len(array), -1).astype(np.float32)
    return rows / BRIGHTEST if is_image(space) else rows


@flatten_rows.register(spaces.Discrete)
def _flatten_discrete(space: spaces.Discrete, values: Any) -> Rows:
    return _as_one_hot(discrete_indices(space, values)[:, 0], int(space.n))


@flatten_rows.register(spaces.MultiDiscrete)
def _flatten_multi_discrete(space: "spaces.MultiDiscrete[Any]", values: Any) -> Rows:
    columns = discrete_indices(space, values).T
    return np.concatenate(list(map(_as_one_hot, columns, space.nvec.flat)), axis=1)


def _as_one_hot(choices: NDArray[np.int64], size: int) -> Rows:
    """Encode (n,) as one-hot (n, size), without an identity matrix, whose memory is quadratic in the size."""
    rows = np.zeros((len(choices), size), np.float32)
    rows[np.arange(len(choices)), choices] = 1
    return rows


@flatten_rows.register(spaces.Dict)
@flatten_rows.register(spaces.Tuple)
def _flatten_parts(space: spaces.Dict | spaces.Tuple, values: Any) -> Rows:
    return np.concatenate(
        [flatten_rows(part, values[key]) for key, part in encoded_parts(space).items()], axis=1
    )


@singledispatch
def unflatten_rows(space: spaces.Space[Any], rows: Rows) -> Any:
    """Invert `flatten_rows`: return an array (n, ...), for Dict a dict of arrays, for Tuple a tuple.

    Text, which rows do not contain, is a tuple of n empty texts.

    Args:
        space: as in `flatten_rows`; parts may be text.
        rows: float32 (n, D).

    Raises:
        TypeError: if the space is of an unsupported class.
    """
    if is_text(space):
        return ("",) * len(rows)
    raise TypeError(f"vectors cannot be converted back to values of {space}; remove it with a wrapper")


@unflatten_rows.register(spaces.Box)
@unflatten_rows.register(spaces.MultiBinary)
def _unflatten_numbers(space: spaces.Box | spaces.MultiBinary, rows: Rows) -> NDArray[Any]:
    numbers = np.rint(rows * BRIGHTEST) if is_image(space) else rows
    return numbers.reshape(-1, *space.shape).astype(space.dtype)


@unflatten_rows.register(spaces.Discrete)
def _unflatten_discrete(space: spaces.Discrete, rows: Rows) -> NDArray[Any]:
    return (rows.argmax(axis=1) + space.start).astype(space.dtype)


@unflatten_rows.register(spaces.MultiDiscrete)
def _unflatten_multi_discrete(space: spaces.MultiDiscrete, rows: Rows) -> NDArray[Any]:
    parts = np.split(rows, np.cumsum(space.nvec.ravel())[:-1], axis=1)
    choices = np.stack([part.argmax(axis=1) for part in parts], axis=1) + space.start.ravel()
    return choices.reshape(-1, *space.shape).astype(space.dtype)


@unflatten_rows.register(spaces.Dict)
@unflatten_rows.register(spaces.Tuple)
def _unflatten_parts(space: spaces.Dict | spaces.Tuple, rows: Rows) -> dict[str, Any] | tuple[Any, ...]:
    parts = parts_of(space)
    columns = np.split(rows, np.cumsum([encoded_width(part) for part in parts.values()])[:-1], axis=1)
    values = {key: unflatten_rows(parts[key], each) for key, each in zip(parts, columns, strict=True)}
    return values if isinstance(space, spaces.Dict) else tuple(values.values())


def discrete_indices(space: DiscreteSpace, values: Any) -> NDArray[np.int64]:
    """Convert discrete values to indices counted from 0, int64 (n, D); D is 1 for Discrete.

    Raises:
        RowError: if a value is not in the space.
    """
    array = np.asarray(values)
    array = array.reshape(len(array), -1)
    choices = array.astype(np.int64) - np.ravel(discrete_start(space))
    sizes = discrete_sizes(space)
    check_rows_inside(space, array, (choices >= 0) & (choices < sizes) & (array == array.astype(np.int64)))
    return choices


def check_rows_inside(space: Space, rows: NDArray[Any], inside: NDArray[np.bool_]) -> None:
    """Raise RowError with the first row of ``rows`` (n, D) that is outside of a space.

    Args:
        space: space of one row, for the message.
        rows: values (n, D).
        inside: bool (n, D), True for the values that are in the space.
    """
    if not inside.all():
        row = int(np.argmin(inside.all(axis=1)))
        raise RowError(row, f"is {rows[row].tolist()}, outside of {space}")


TOLERANCE = 1e-4
"""Tolerance for rounding: a value may exceed a bound b by ``TOLERANCE * max(1, |b|)``."""


def tolerant_bounds(space: spaces.Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bounds of a Box, float64, extended by the tolerance for rounding."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    slack_low, slack_high = (TOLERANCE * np.maximum(1, np.abs(bound)) for bound in (low, high))
    return low - slack_low, high + slack_high


def discrete_sizes(space: DiscreteSpace) -> NDArray[np.int64]:
    """Return the number of values of each discrete component, int64 (D,); D is 1 for Discrete."""
    if isinstance(space, spaces.MultiBinary):
        return np.full(math.prod(space.shape), 2)
    return np.ravel(space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n).astype(np.int64)


def discrete_start(space: spaces.Space[Any]) -> Any:
    """Return the smallest discrete value, in the shape of the space; 0 for spaces without a start."""
    return getattr(space, "start", 0)
