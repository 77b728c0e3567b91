"""Classification of spaces and their parts, and the widths of their encoded rows."""

from typing import Any

import numpy as np
from gymnasium import spaces
from minari.dataset.minari_storage import is_image_space as is_minari_image
from stable_baselines3.common.preprocessing import is_image_space

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


def kept_parts(space: spaces.Dict | spaces.Tuple) -> dict[Any, Space]:
    """Return the parts of a space that are encoded, which are all except those that contain only text."""
    return {key: part for key, part in parts_of(space).items() if not is_nothing_but_text(part)}


def is_nothing_but_text(space: Space) -> bool:
    """Return whether a space contains only text."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return not kept_parts(space)
    return is_text(space)


def row_width(space: Space) -> int:
    """Return the width of the encoded row of a space, without its text.

    Raises:
        ValueError: if Gymnasium cannot flatten it.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(map(row_width, kept_parts(space).values()))
    return spaces.flatdim(space)


def texts_in(space: Space, where: str) -> list[str]:
    """Return the paths of the parts of a space that are text, in the form ``where['key']``."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = parts_of(space).items()
        return [text for key, part in parts for text in texts_in(part, f"{where}[{key!r}]")]
    return [where] if is_text(space) else []
