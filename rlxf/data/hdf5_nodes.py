"""Groups and arrays of HDF5 files from others: each is opened once, after checks of its link and storage."""

import math
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

FILTERS = {
    *(h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_SZIP),
    *(h5py.h5z.FILTER_NBIT, h5py.h5z.FILTER_SCALEOFFSET, h5py.h5z.FILTER_LZF),
}
"""Filters built into HDF5 and h5py. HDF5 searches folders for the library of any other filter."""


class LocalGroup:
    """Group whose members are opened if all of their data are in the same file.

    External links, external storage and virtual datasets could expose other files on the machine. A member is
    checked and opened once, and stays open.

    Args:
        group: the opened group.
    """

    def __init__(self, group: h5py.Group):
        self.group = group
        self._members: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return the group, as `LocalGroup`, or the array of this name.

        Args:
            name: name of a member; "/" separates the names of nested groups.

        Raises:
            KeyError: if the member does not exist.
            ValueError: if it is a soft or external link, or an array with external or virtual storage or a
                filter plugin.
        """
        node = self
        for part in filter(None, name.split("/")):
            node = node._member(part)
        return node

    def _member(self, name: str) -> Any:
        if name not in self._members:
            self._members[name] = _open(self.group, name)
        return self._members[name]

    def arrays(self, name: str) -> Iterator[h5py.Dataset]:
        """Yield the array of this name, or all arrays below the group of this name.

        Raises:
            ValueError: if a node occurs twice: hard links to common groups would take exponential time.
            KeyError, ValueError: as `__getitem__`.
        """
        yield from _arrays(self[name], set())

    def number(self, name: str, default: float) -> Any:
        """Return an attribute that is a single number; the default if it does not exist.

        Raises:
            ValueError: if it is not a single number. Its value, which can be large, is then not read.
        """
        attributes = self.group.attrs
        if name not in attributes:
            return default
        attribute = attributes.get_id(name)
        if attribute.shape != () or attribute.dtype.kind not in "biuf":
            raise ValueError(f"{name} is not a single number")
        value = np.empty((), attribute.dtype)
        attribute.read(value)
        return value[()]


def read_rows(array: h5py.Dataset, start: int, stop: int) -> NDArray[Any]:
    """Return ``array[start:stop]`` of numbers by h5py's low-level functions; the range must be in the array.

    Of an array that is read once, ``array[start:stop]`` takes twice as long.
    """
    shape = (stop - start, *array.shape[1:])
    rows = np.empty(shape, array.dtype)
    selected = array.id.get_space()
    selected.select_hyperslab((start, *(0 for _ in shape[1:])), shape)
    array.id.read(h5py.h5s.create_simple(shape), selected, rows)
    return rows


def chunk_bytes(array: h5py.Dataset) -> int:
    """Return the bytes of memory for reading a single value: a chunk is decompressed as a whole."""
    chunks = array.chunks
    return 0 if chunks is None else math.prod(chunks) * array.dtype.itemsize


def _open(group: h5py.Group, name: str) -> Any:
    """Open a member by h5py's low-level functions, which take half of the time of ``group[name]``."""
    key = name.encode("utf-8", "surrogateescape")  # as h5py does
    _check_link(group, name, key)
    identifier = h5py.h5o.open(group.id, key)
    if isinstance(identifier, h5py.h5g.GroupID):
        return LocalGroup(h5py.Group(identifier))
    array = h5py.Dataset(identifier, readonly=True)
    _check_storage(name, array)
    return array


def _check_link(group: h5py.Group, name: str, key: bytes) -> None:
    links = group.id.links
    if not links.exists(key):
        raise KeyError(f"{name} is missing")
    if links.get_info(key).type != h5py.h5l.TYPE_HARD:
        link = type(group.get(name, getlink=True)).__name__
        raise ValueError(f"{name} is a link ({link}), which is not followed")


def _check_storage(name: str, array: Any) -> None:
    properties = array.id.get_create_plist()
    if properties.get_layout() == h5py.h5d.VIRTUAL or properties.get_external_count():
        raise ValueError(f"{name} is stored in other files, which are not read")
    for number in range(properties.get_nfilters()):
        code = properties.get_filter(number)[0]
        if code not in FILTERS:
            raise ValueError(f"{name} needs the filter plugin {code}, which is not loaded")


def _arrays(node: Any, seen: set[int]) -> Iterator[h5py.Dataset]:
    """Yield a node, or all arrays below it if it is a group; ``seen`` has the addresses of other nodes."""
    opened = node.group if isinstance(node, LocalGroup) else node
    address = h5py.h5o.get_info(opened.id).addr
    if address in seen:
        raise ValueError(f"{opened.name} has several hard links")
    seen.add(address)
    if isinstance(node, LocalGroup):
        for key in opened:
            yield from _arrays(node[key], seen)
    else:
        yield node
