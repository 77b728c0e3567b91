"""Lookup of Minari datasets on this machine, before their episodes are read."""

import hashlib
import os
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import minari
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from minari.dataset.minari_dataset import parse_dataset_id
from minari.dataset.minari_storage import METADATA_FILE_NAME, is_image_space
from minari.storage.datasets_root_dir import get_dataset_path

from rlxf.data.dataset_validation import HDF5, check_format, check_readable, find_damage
from rlxf.data.download import download
from rlxf.data.spaces import leaves
from rlxf.utils.errors import DatasetError

_UNREADABLE = (
    *(ValueError, TypeError, OSError, KeyError, AttributeError, AssertionError, ImportError),
    *(NotImplementedError, RecursionError, OverflowError, MemoryError, IndexError),
)
"""Exceptions that Minari and Gymnasium raise for invalid metadata."""
_FILE_SUFFIX = re.compile(r"\.[A-Za-z]\w*")
"""Suffix of the name of a file."""
_CONVERSION_GUIDE = "docs/how-to/record-and-convert-datasets.md"
Dataset: TypeAlias = str | minari.MinariDataset


def local_ids() -> list[str]:
    """Return the ids of all datasets on this machine, sorted by namespace, name and version.

    Each folder with a subfolder ``data`` is a dataset, and its path is the id. Damaged datasets are included,
    and folders whose path is not a Minari id, which come last. Hidden folders and symbolic links to a folder
    above them are skipped.
    """
    root = get_dataset_path()
    found = []
    for folder, children, _ in os.walk(root, followlinks=True):
        path = Path(folder)
        if path != root and "data" in children:
            found.append(path.relative_to(root).as_posix())
            children.clear()
        children[:] = [each for each in children if each[0] != "." and not _is_cycle(path / each, root)]
    return sorted(found, key=_sort_key)


def _is_cycle(folder: Path, root: Path) -> bool:
    """Return whether a folder is a symbolic link to a folder above it, up to ``root``."""
    above = [parent for parent in folder.parents if parent.is_relative_to(root)]
    return folder.is_symlink() and any(folder.samefile(parent) for parent in above)


def _sort_key(dataset_id: str) -> tuple[bool, str, str, int]:
    """Return the key that sorts ids; malformed ids come last."""
    try:
        namespace, name, version = parse_dataset_id(dataset_id)
    except ValueError:
        return True, dataset_id, "", 0
    return False, namespace or "", name, version


@dataclass(frozen=True, eq=False)
class Source:
    """Dataset with a selection of its episodes.

    Args:
        dataset: Minari dataset.
        selected: indices of the episodes to read, in this order; None for all episodes.
    """

    dataset: minari.MinariDataset
    selected: tuple[int, ...] | None

    @property
    def id(self) -> str:
        """Minari id."""
        return self.dataset.id

    @property
    def file(self) -> Path:
        """Path of the file with the episodes."""
        return Path(self.dataset.storage.data_path) / HDF5

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Metadata of Minari."""
        return self.dataset.storage.metadata

    @property
    def episodes(self) -> Sequence[int]:
        """Indices of the episodes to read."""
        return range(self.metadata["total_episodes"]) if self.selected is None else self.selected

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """Observation space of the dataset."""
        return self.dataset.observation_space

    @property
    def action_space(self) -> spaces.Space[Any]:
        """Action space of the dataset."""
        return self.dataset.action_space

    @property
    def eval_env_spec(self) -> EnvSpec | None:
        """Spec of the evaluation environment; that of the data unless the dataset names another."""
        # Minari has no public accessor of this spec, only a method that makes the environment.
        return self.dataset._eval_env_spec or self.dataset.env_spec

    @property
    def has_jpeg(self) -> bool:
        """True if images, including those in a Dict or a Tuple, are stored as JPEG."""
        images = any(is_image_space(leaf) for _, leaf in leaves(self.observation_space))
        return self.dataset.storage.jpeg_encoding and images

    @property
    def identity(self) -> dict[str, Any]:
        """Key of the cache: id, SHA-256 of the metadata and SHA-256 of the selected episodes."""
        metadata = (self.file.parent / METADATA_FILE_NAME).read_bytes()
        chosen = None if self.selected is None else _digest(repr(self.selected).encode())
        return {"id": self.id, "metadata_sha256": _digest(metadata), "episodes_sha256": chosen}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Size and modification time of the file, for fast detection of changes."""
        status = self.file.stat()
        return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def open_source(dataset: Dataset, download_missing: bool = False) -> Source:
    """Open a dataset by its id, or validate a ``MinariDataset``; episodes are not read yet.

    Args:
        dataset: a Minari id, or a ``MinariDataset``, of which only the selected episodes are read.
        download_missing: True to download a dataset that is missing or incomplete on this machine.

    Raises:
        DatasetError: if the dataset is unknown, empty, damaged, or not stored as HDF5, if its file cannot be
            read at present, or if an index of a selected episode does not exist.
        TypeError: if ``dataset`` is neither an id nor a ``MinariDataset``.
        ConnectionError: if the download fails.
    """
    opened = _find(dataset, download_missing) if isinstance(dataset, str) else dataset
    if not isinstance(opened, minari.MinariDataset):
        raise TypeError(
            "a dataset must be a Minari id, a MinariDataset, or a list of these, got "
            f"{type(dataset).__name__}; convert your own arrays first: see {_CONVERSION_GUIDE}"
        )
    check_format(opened.id, opened.storage.metadata)
    total = int(opened.storage.total_episodes)
    selected = _checked_selection(opened, total)
    complete = np.array_equal(selected, np.arange(total))
    return Source(opened, None if complete else selected)


def _checked_selection(dataset: minari.MinariDataset, total: int) -> tuple[int, ...]:
    """Return the indices of the selected episodes of a dataset with ``total`` episodes."""
    indices = np.asarray(dataset.episode_indices)
    if not indices.size:
        raise DatasetError(
            f"dataset {dataset.id} has no episodes; record some, or select more with the filter"
        )
    if indices.dtype.kind not in "iu" or indices.min() < 0 or indices.max() >= total:
        raise DatasetError(
            f"the selected episodes of dataset {dataset.id} must be integers from 0 to {total - 1}, got "
            f"{reprlib.repr(indices.tolist())}; select them with MinariDataset.filter_episodes"
        )
    return tuple(indices.tolist())


def _find(dataset_id: str, download_missing: bool) -> minari.MinariDataset:
    try:
        check_id(dataset_id)
    except DatasetError:
        _check_no_file(dataset_id)
        raise
    folder = get_dataset_path(dataset_id)
    damage = find_damage(folder)
    if damage is not None and download_missing:
        download(dataset_id)
    elif damage is not None:
        raise DatasetError(_missing_message(dataset_id, folder, damage))
    check_readable(dataset_id, folder)
    try:
        return minari.load_dataset(dataset_id)
    except _UNREADABLE as error:
        reason = f"its metadata.json is malformed ({type(error).__name__}: {error})"
        raise DatasetError(f"dataset {dataset_id} in {folder} cannot be opened: {reason}") from error


def _missing_message(dataset_id: str, folder: Path, damage: str) -> str:
    """Return the error message for a dataset that is not on this machine, or is damaged."""
    if (folder / "data").exists():
        return (
            f"dataset {dataset_id} in {folder} cannot be opened: {damage}. Download it again with "
            f"download=True (--download), or record it again"
        )
    similar = ", ".join(get_close_matches(dataset_id, local_ids(), n=4)) or "none"
    return (
        f"dataset {dataset_id!r} is not in {get_dataset_path()} (similar names: {similar}). Download it with "
        f"download=True (--download), or set MINARI_DATASETS_PATH to the folder that contains it"
    )


def _check_no_file(dataset_id: str) -> None:
    """Raise DatasetError if the name of a file, such as ``data.npz``, was given in place of an id."""
    if _FILE_SUFFIX.fullmatch(Path(dataset_id).suffix) or os.path.isfile(dataset_id):
        raise DatasetError(
            f"{dataset_id!r} is the name of a file, not a Minari id; convert it to a Minari dataset first: "
            f"see {_CONVERSION_GUIDE}"
        )


def check_id(dataset_id: str) -> None:
    """Raise DatasetError if this is not a Minari id."""
    try:
        parse_dataset_id(dataset_id)
    except (ValueError, TypeError) as error:
        raise DatasetError(
            f"{dataset_id!r} is not a Minari id; write namespace/name-v0, for example "
            f"mujoco/hopper/medium-v0; a namespace has at least two characters"
        ) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
