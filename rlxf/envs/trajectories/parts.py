"""What the parts of an observation are, and how many numbers each of them is in a row."""

from typing import Any

import numpy as np
from gymnasium import spaces
from minari.dataset.minari_storage import is_image_space as is_minari_image
from stable_baselines3.common.preprocessing import is_image_space

Space = spaces.Space[Any]
FLAT = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""What numbers and choices are made of; all but text that is not nested."""


def is_image(space: Space) -> bool:
    """Whether this is a uint8 Box from 0 to 255 with three axes, or with two of at least 32."""
    return is_image_space(space) or is_minari_image(space)


def is_text(space: Space) -> bool:
    """Whether its values are strings: Gymnasium's Text, and spaces of others such as MiniGrid's missions."""
    return space.dtype is not None and np.issubdtype(space.dtype, np.str_)


def parts_of(space: spaces.Dict | spaces.Tuple) -> dict[Any, Space]:
    """The parts of a Dict by their sorted keys, or those of a Tuple by their numbers."""
    return dict(sorted(space.spaces.items())) if isinstance(space, spaces.Dict) else dict(enumerate(space))


def kept_parts(space: spaces.Dict | spaces.Tuple) -> dict[Any, Space]:
    """`parts_of` a space but those that are text, or hold nothing else: these are left out of rows."""
    return {key: part for key, part in parts_of(space).items() if not is_nothing_but_text(part)}


def is_nothing_but_text(space: Space) -> bool:
    """Whether no part of it is anything else."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return not kept_parts(space)
    return is_text(space)


def row_width(space: Space) -> int:
    """How many numbers of a row a space becomes, its text left out.

    Raises:
        ValueError: if Gymnasium cannot flatten it.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(map(row_width, kept_parts(space).values()))
    return spaces.flatdim(space)


def texts_in(space: Space, where: str) -> list[str]:
    """The parts of a space that are text, each as ``where['key']``."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        named = parts_of(space).items()
        return [text for key, part in named for text in texts_in(part, f"{where}[{key!r}]")]
    return [where] if is_text(space) else []
