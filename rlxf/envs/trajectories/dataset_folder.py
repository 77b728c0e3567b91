"""Whether the folder of a Minari dataset is all there, told without reading its episodes."""

import json
from pathlib import Path

import h5py
from minari.dataset.minari_storage import METADATA_FILE_NAME

HDF5 = "main_data.hdf5"
METADATA_BYTES = 4 * 2**20
"""Largest metadata that are parsed: Python objects take up to 40 times the bytes of their text."""


def find_damage(folder: Path) -> str | None:
    """What a download or copy that was cut has left out; None if nothing shows.

    Metadata are parsed, and the file of the episodes is opened: HDF5 notes its length, so a truncated file
    does not open. What is wrong inside of it is found when it is read.

    Args:
        folder: of one dataset, with the folder ``data`` in it.
    """
    metadata, episodes = folder / "data" / METADATA_FILE_NAME, folder / "data" / HDF5
    if not metadata.is_file():
        return f"{metadata} is missing"
    size = metadata.stat().st_size
    if size > METADATA_BYTES:
        return f"{metadata} has {size:,} bytes, at most {METADATA_BYTES:,} are read"
    try:
        described = dict(json.loads(metadata.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        return f"{metadata}: the file is truncated or altered ({error})"
    kept_so = described.get("data_format", "hdf5") == "hdf5"
    return _find_damage(episodes) if kept_so and described.get("total_episodes") else None


def _find_damage(episodes: Path) -> str | None:
    if not episodes.is_file():
        return f"{episodes} is missing"
    try:
        h5py.File(episodes, "r").close()
    except OSError as error:
        return f"{episodes}: the file is truncated or altered ({error})"
    return None
