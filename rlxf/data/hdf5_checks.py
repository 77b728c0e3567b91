"""Checks of HDF5 files before they are read: links, shapes and dtypes."""

import math
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from gymnasium import spaces
from minari.dataset.minari_storage import is_image_space

from rlxf.data.dataset_source import Source
from rlxf.data.spaces import is_text, parts_of

FILTERS = {
    *(h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_SZIP),
    *(h5py.h5z.FILTER_NBIT, h5py.h5z.FILTER_SCALEOFFSET, h5py.h5z.FILTER_LZF),
}
"""Filters built into HDF5 and h5py. HDF5 searches folders for the library of any other filter."""


def open_local_node(group: Any, name: str) -> Any:
    """Return the group or array of this name, if all of its data are in the same file.

    External links, external storage and virtual datasets could expose other files on the machine.

    Args:
        group: an ``h5py.Group``.
        name: name of a member; "/" separates the names of nested groups.

    Raises:
        KeyError: if the member does not exist.
        ValueError: if it is a soft or external link, or an array with external or virtual storage or a
            filter plugin.
    """
    node = group
    for part in filter(None, name.split("/")):
        node = _member(node, part)
    if isinstance(node, h5py.Dataset):
        _check_storage(name, node)
    return node


def _member(group: Any, name: str) -> Any:
    link = group.get(name, getlink=True)
    if link is None:
        raise KeyError(f"{name} is missing")
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{name} is a link ({type(link).__name__}), which is not followed")
    return group[name]


def _check_storage(name: str, array: Any) -> None:
    if array.is_virtual or array.external:
        raise ValueError(f"{name} is stored in other files, which are not read")
    properties = array.id.get_create_plist()
    for number in range(properties.get_nfilters()):
        code = properties.get_filter(number)[0]
        if code not in FILTERS:
            raise ValueError(f"{name} needs the filter plugin {code}, which is not loaded")


ENDS = ("terminations", "truncations")


def local_arrays(group: h5py.Group, name: str) -> Iterator[h5py.Dataset]:
    """Yield the array of this name in a group, or all arrays below the group of this name.

    Raises:
        ValueError, KeyError: as `open_local_node`.
    """
    node = open_local_node(group, name)
    if isinstance(node, h5py.Group):
        for key in node:
            yield from local_arrays(node, key)
    else:
        yield node


def chunk_bytes(array: h5py.Dataset) -> int:
    """Return the bytes of memory for reading a single value: a chunk is decompressed as a whole."""
    return 0 if array.chunks is None else math.prod(array.chunks) * array.dtype.itemsize


def episode_mismatch(group: h5py.Group, source: Source) -> str | None:
    """Describe an array of an episode whose shape or dtype differs from the metadata; None if all match."""
    faults = {
        "observations": array_mismatch(group["observations"], source.observation_space, source.has_jpeg),
        "actions": array_mismatch(group["actions"], source.action_space, jpeg=False),
        **{name: scalar_mismatch(group[name]) for name in ("rewards", *ENDS)},
    }
    return next((f"{name} {fault}" for name, fault in faults.items() if fault), None)


def array_mismatch(node: Any, space: spaces.Space[Any], jpeg: bool) -> str | None:
    """Describe how the rows of an array differ from a space in shape or dtype; None if they do not.

    Args:
        node: a group for a Dict or a Tuple, else an array (rows, ...).
        space: space of one row. Another dtype is allowed if ``numpy.can_cast`` permits it ("same_kind").
        jpeg: True if images are stored as JPEG.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keyed = isinstance(space, spaces.Dict)
        parts = ((key if keyed else f"_index_{key}", part) for key, part in parts_of(space).items())
        faults = ((key, array_mismatch(node[key], part, jpeg)) for key, part in parts)
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


def scalar_mismatch(array: h5py.Dataset) -> str | None:
    """Describe why an array does not have a single number per step; None if it does."""
    numbers = math.prod(array.shape[1:])
    if numbers != 1 or array.dtype.kind not in "biuf":
        return f"are of {array.dtype} with rows of shape {array.shape[1:]}, not a single number per step"
    return None
