"""Validation of shapes and dtypes in a Minari HDF5 file without reading the values."""

import math
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from gymnasium import spaces
from minari.dataset.minari_storage import is_image_space

from rlxf.envs.trajectories.hdf5_links import open_own
from rlxf.envs.trajectories.parts import is_text, parts_of
from rlxf.envs.trajectories.source import Source

ENDS = ("terminations", "truncations")


def own_arrays(group: h5py.Group, name: str) -> Iterator[h5py.Dataset]:
    """Yield the array of this name in a group, or all arrays below the group of this name.

    Raises:
        ValueError, KeyError: as `open_own`.
    """
    node = open_own(group, name)
    if isinstance(node, h5py.Group):
        for key in node:
            yield from own_arrays(node, key)
    else:
        yield node


def chunk_bytes(array: h5py.Dataset) -> int:
    """Return the bytes of memory for reading a single value: a chunk is decompressed as a whole."""
    return 0 if array.chunks is None else math.prod(array.chunks) * array.dtype.itemsize


def episode_fault(group: h5py.Group, source: Source) -> str | None:
    """Describe an array of an episode whose shape or dtype differs from the metadata; None if all match."""
    faults = {
        "observations": form_fault(group["observations"], source.observation_space, source.has_jpeg),
        "actions": form_fault(group["actions"], source.action_space, jpeg=False),
        **{name: single_fault(group[name]) for name in ("rewards", *ENDS)},
    }
    return next((f"{name} {fault}" for name, fault in faults.items() if fault), None)


def form_fault(node: Any, space: spaces.Space[Any], jpeg: bool) -> str | None:
    """Describe how the rows of an array differ from a space in shape or dtype; None if they do not.

    Args:
        node: a group for a Dict or a Tuple, else an array (rows, ...).
        space: space of one row. Another dtype is allowed if ``numpy.can_cast`` permits it ("same_kind").
        jpeg: True if images are stored as JPEG.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keyed = isinstance(space, spaces.Dict)
        parts = ((key if keyed else f"_index_{key}", part) for key, part in parts_of(space).items())
        faults = ((key, form_fault(node[key], part, jpeg)) for key, part in parts)
        return next((f"{key!r} {fault}" for key, fault in faults if fault), None)
    if is_text(space) or (jpeg and is_image_space(space)):
        return None
    return _array_fault(node, space)


def _array_fault(array: h5py.Dataset, space: spaces.Space[Any]) -> str | None:
    rows = array.shape[1:]
    is_choice = isinstance(space, spaces.Discrete) and rows == (1,)
    if rows != space.shape and not is_choice:
        return f"have rows of shape {rows}, the metadata say {space.shape} ({space})"
    if array.dtype.kind not in "biuf" or not _castable(array.dtype, space.dtype):
        return f"are of {array.dtype}, the metadata say {space.dtype} ({space})"
    return None


def _castable(stored: np.dtype[Any], expected: Any) -> bool:
    """Return whether a cast is allowed; integers of all widths are, since values are checked separately."""
    both_integers = stored.kind in "biu" and expected.kind in "biu"
    return both_integers or bool(np.can_cast(stored, expected, "same_kind"))


def single_fault(array: h5py.Dataset) -> str | None:
    """Describe why an array does not have a single number per step; None if it does."""
    numbers = math.prod(array.shape[1:])
    if numbers != 1 or array.dtype.kind not in "biuf":
        return f"are of {array.dtype} with rows of shape {array.shape[1:]}, not a single number per step"
    return None
