"""Parts of an HDF5 file that are elsewhere: other files, and filters that HDF5 loads as libraries."""

from typing import Any

import h5py

FILTERS = {
    *(h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32, h5py.h5z.FILTER_SZIP),
    *(h5py.h5z.FILTER_NBIT, h5py.h5z.FILTER_SCALEOFFSET, h5py.h5z.FILTER_LZF),
}
"""Filters that are part of HDF5 and h5py. HDF5 searches folders for the library of any other filter."""


def open_own(group: Any, name: str) -> Any:
    """Return the group or array of this name if all of it is in the same file.

    External links, external and virtual storage let a file expose the content of other files on the machine.

    Args:
        group: an ``h5py.Group``.
        name: of a member; "/" separates those of groups in groups.

    Raises:
        KeyError: if there is no such member.
        ValueError: if it is a link to another place, or an array that is stored elsewhere or needs a plugin.
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
    created = array.id.get_create_plist()
    for number in range(created.get_nfilters()):
        code = created.get_filter(number)[0]
        if code not in FILTERS:
            raise ValueError(f"{name} needs the filter plugin {code}, which is not loaded")
