"""Protection against HDF5 files that refer to other files or to filter plugins."""

from typing import Any

import h5py

FILTERS = {
    *(h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_SZIP),
    *(h5py.h5z.FILTER_NBIT, h5py.h5z.FILTER_SCALEOFFSET, h5py.h5z.FILTER_LZF),
}
"""Filters built into HDF5 and h5py. HDF5 searches folders for the library of any other filter."""


def open_own(group: Any, name: str) -> Any:
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
