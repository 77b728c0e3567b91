"""Whether there is room on the disk, before HDF5 finds that there is none."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from minari.data_collector import EpisodeBuffer

PER_ARRAY = 1 << 14
"""Bytes that HDF5 needs at most for an array beside its values: headers, an index, the rest of a chunk."""


def check_space(folder: Path, episodes: Iterable[EpisodeBuffer]) -> None:
    """Raise unless ``folder`` has room for these episodes.

    A full disk under HDF5 leaves objects in the process that cannot be closed, and a later file can then
    end it with a segmentation fault (h5py, issue 914). So the blocks are asked for first, and given back.

    Args:
        folder: on the disk in question.
        episodes: to be written next.

    Raises:
        OSError: if the disk, a quota or a limit of the process forbids it.
    """
    path = folder / "space"
    needed = sum(_bytes(array) for episode in episodes for array in _arrays(vars(episode)))
    try:
        with open(path, "wb") as handle:
            os.posix_fallocate(handle.fileno(), 0, needed)
    finally:
        path.unlink(missing_ok=True)


def _arrays(node: Any) -> Iterator[Any]:
    """What becomes an array of the file: all leaves of nested dicts and tuples."""
    if isinstance(node, Mapping):
        node = tuple(node.values())
    if not isinstance(node, tuple):
        yield node
        return
    for part in node:
        yield from _arrays(part)


def _bytes(array: Any) -> int:
    """Twice the values, since chunks are about half full at worst, and what is beside them."""
    return 2 * int(np.asarray(array).nbytes) + PER_ARRAY
