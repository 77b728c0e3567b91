"""Validation of the files of a Minari dataset before Minari opens them."""

import errno
import json
import os
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import minari
import numpy as np
from minari.dataset.minari_storage import METADATA_FILE_NAME
from PIL import Image

from rlxf.utils.errors import DatasetError

HDF5 = "main_data.hdf5"
METADATA_BYTES = 4 * 2**20
"""Largest size of metadata in bytes: parsed Python objects take up to 40 times the size of their text."""
SPACES = ("observation_space", "action_space")
DAMAGE = (
    *(OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, IndexError, MemoryError),
    Image.DecompressionBombError,
)
"""Exceptions of h5py and Pillow for damaged files: OSError and RuntimeError by the checks of h5py, KeyError
for missing names, and the others for damaged types and sizes."""
_ACCESS_ERRORS = {errno.EAGAIN, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO}
"""Codes of errors of the system: the file is locked, not permitted, one too many, or on a failing disk."""


def raise_if_inaccessible(file: Path, error: Exception) -> None:
    """Raise DatasetError if the system refused to read a file, which then need not be damaged."""
    if isinstance(error, OSError) and error.errno in _ACCESS_ERRORS:
        raise DatasetError(
            f"{file} cannot be read ({os.strerror(error.errno)}), but need not be damaged: end other "
            f"processes that write to it, or check its permissions and the disk, then try again"
        ) from error


def find_damage(folder: Path) -> str | None:
    """Describe the damage of an incomplete download or copy; return None if none is detected.

    The metadata are parsed and the episode file is opened. HDF5 stores the file's length, so opening a
    truncated file fails. Damage inside of the file is detected when episodes are read.

    Args:
        folder: folder of one dataset, which contains the folder ``data``.

    Raises:
        DatasetError: if the system refuses to read a file, e.g. because another process writes to it.
    """
    metadata, episodes = folder / "data" / METADATA_FILE_NAME, folder / "data" / HDF5
    if not metadata.is_file():
        return f"{metadata} is missing"
    size = metadata.stat().st_size
    if size > METADATA_BYTES:
        return f"{metadata} has {size:,} bytes, the maximum is {METADATA_BYTES:,}"
    try:
        fields = dict(json.loads(metadata.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise_if_inaccessible(metadata, error)
        return f"{metadata}: the file is truncated or altered ({error})"
    is_hdf5 = fields.get("data_format", "hdf5") == "hdf5"
    return _find_damage(episodes, fields.get("total_episodes")) if is_hdf5 else None


def _find_damage(episodes: Path, stated: Any) -> str | None:
    """Describe the damage of an episode file whose metadata state a number of episodes, which may be 0."""
    if type(stated) is int and stated == 0:
        return None
    if not episodes.is_file():
        return f"{episodes} is missing"
    try:
        with h5py.File(episodes, "r") as file:
            number = len(file)
    except DAMAGE as error:
        raise_if_inaccessible(episodes, error)
        return f"{episodes}: the file is truncated or altered ({error})"
    if type(stated) is int and stated == number:
        return None
    difference = f"it has {number} episodes, but the metadata state {str(stated)[:20]}"
    return f"{episodes}: the file is truncated or altered ({difference})"


def check_readable(dataset_id: str, folder: Path) -> None:
    """Reject metadata of another id or version, or for which Minari would run code or take unbounded memory.

    Minari creates the environment if a space is missing, and imports the readers of other formats than HDF5.
    It makes an array of the numbers of all episodes, and arrays of the dtypes of the spaces.
    """
    metadata = json.loads((folder / "data" / METADATA_FILE_NAME).read_bytes())
    if (stated := metadata.get("dataset_id")) != dataset_id:
        raise DatasetError(
            f"dataset {dataset_id} in {folder} cannot be opened: its metadata.json has the id "
            f"{reprlib.repr(stated)}. Correct the id, or move the folder to the place of this id"
        )
    if missing := [name for name in SPACES if not isinstance(metadata.get(name), str)]:
        raise DatasetError(
            f"dataset {dataset_id} in {folder} cannot be opened: its metadata.json lacks {missing[0]}. It is "
            f"not read from the environment, whose creation can run code. Record the dataset again"
        )
    version = metadata.get("minari_version")
    if isinstance(version, str) and version not in minari.supported_dataset_versions:
        known = sorted(minari.supported_dataset_versions, key=lambda each: [*map(int, each.split("."))])
        raise DatasetError(
            f"dataset {dataset_id} in {folder} cannot be opened: it was made by Minari {version[:20]!r}, and "
            f"the installed Minari {minari.__version__} reads datasets of {known[0]} to {known[-1]}. Install "
            f"another version of Minari, or convert or record the dataset again with this one"
        )
    check_format(dataset_id, metadata)
    if fault := _dtype_fault(metadata):
        raise DatasetError(
            f"dataset {dataset_id} in {folder} cannot be opened: {fault}. Download it again with "
            f"download=True (--download), or record it again"
        )


def _dtype_fault(metadata: dict[str, Any]) -> str | None:
    """Describe a dtype in the spaces that is not that of a number; None if there is none."""
    for name in SPACES:
        try:
            dtypes = set(_dtypes(json.loads(metadata[name])))
        except (ValueError, TypeError, RecursionError):
            return None  # Minari names the error
        if unknown := sorted(dtype for dtype in dtypes if not _is_numeric(dtype)):
            return f"{name} in its metadata.json has the dtype {unknown[0][:20]!r}, which is not numeric"
    return None


def _dtypes(space: Any) -> Iterator[str]:
    """Yield the dtypes in the JSON of a space."""
    if not isinstance(space, dict):
        return
    parts = space.get("subspaces", ())
    for part in parts.values() if isinstance(parts, dict) else parts:
        yield from _dtypes(part)
    if "dtype" in space:
        yield str(space["dtype"])


def _is_numeric(dtype: str) -> bool:
    try:
        return np.dtype(dtype).kind in "biuf"
    except (TypeError, ValueError, SyntaxError):
        return False


def check_format(dataset_id: str, metadata: dict[str, Any]) -> None:
    """Raise DatasetError if the episodes are not stored as HDF5."""
    data_format = metadata.get("data_format", "hdf5")
    if data_format != "hdf5":
        raise DatasetError(
            f"dataset {dataset_id} is stored as {reprlib.repr(data_format)}; only hdf5 is supported, since "
            f"Minari's reader of other formats truncates episodes of 32,768 or more steps. Record it with "
            f"data_format='hdf5'"
        )
