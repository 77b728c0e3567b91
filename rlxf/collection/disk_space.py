"""Check of free disk space before HDF5 writes."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from minari.data_collector import EpisodeBuffer

PER_ARRAY = 1 << 14
"""Upper bound of HDF5's overhead per array in bytes: headers, an index, and the unused part of a chunk."""


def check_space(folder: Path, episodes: Iterable[EpisodeBuffer]) -> None:
    """Raise unless ``folder`` has enough space for the episodes.

    If the disk is full, HDF5 leaves objects that cannot be closed. A later file can then crash the process
    with a segmentation fault (h5py, issue 914). So this function allocates the space and frees it again.

    Args:
        folder: folder of the dataset.
        episodes: episodes to be written next.

    Raises:
        OSError: if the disk is full, or a quota or a limit of the process is exceeded.
    """
    path = folder / "space"
    needed = sum(_bytes(array) for episode in episodes for array in _arrays(vars(episode)))
    try:
        with open(path, "wb") as handle:
            os.posix_fallocate(handle.fileno(), 0, needed)
    finally:
        path.unlink(missing_ok=True)


def _arrays(node: Any) -> Iterator[Any]:
    """Yield all leaves of nested dicts and tuples. HDF5 stores each as an array."""
    if isinstance(node, Mapping):
        node = tuple(node.values())
    if not isinstance(node, tuple):
        yield node
        return
    for part in node:
        yield from _arrays(part)


def _bytes(array: Any) -> int:
    """Return the size of the values times 2, since chunks may be half empty, plus the overhead."""
    return 2 * int(np.asarray(array).nbytes) + PER_ARRAY
