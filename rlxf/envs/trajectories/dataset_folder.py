"""Detection of incomplete Minari dataset folders without reading the episodes."""

import json
from pathlib import Path

import h5py
from minari.dataset.minari_storage import METADATA_FILE_NAME

HDF5 = "main_data.hdf5"
METADATA_BYTES = 4 * 2**20
"""Largest size of metadata in bytes: parsed Python objects take up to 40 times the size of their text."""


def find_damage(folder: Path) -> str | None:
    """Describe the damage of an incomplete download or copy; return None if none is detected.

    The metadata are parsed and the episode file is opened. HDF5 stores the file's length, so opening a
    truncated file fails. Damage inside of the file is detected when episodes are read.

    Args:
        folder: folder of one dataset, which contains the folder ``data``.
    """
    metadata, episodes = folder / "data" / METADATA_FILE_NAME, folder / "data" / HDF5
    if not metadata.is_file():
        return f"{metadata} is missing"
    size = metadata.stat().st_size
    if size > METADATA_BYTES:
        return f"{metadata} has {size:,} bytes, the maximum is {METADATA_BYTES:,}"
    try:
        fields = dict(json.loads(metadata.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        return f"{metadata}: the file is truncated or altered ({error})"
    is_hdf5 = fields.get("data_format", "hdf5") == "hdf5"
    return _find_damage(episodes) if is_hdf5 and fields.get("total_episodes") else None


def _find_damage(episodes: Path) -> str | None:
    if not episodes.is_file():
        return f"{episodes} is missing"
    try:
        h5py.File(episodes, "r").close()
    except OSError as error:
        return f"{episodes}: the file is truncated or altered ({error})"
    return None
