"""One Minari dataset, found and checked, before its data are read."""

import hashlib
import json
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

from rlxf.envs.trajectories.dataset_folder import HDF5, find_damage
from rlxf.envs.trajectories.download import download
from rlxf.envs.trajectories.errors import DatasetError
from rlxf.envs.trajectories.parts import parts_of

SPACES = ("observation_space", "action_space")
_UNREADABLE = (
    *(ValueError, TypeError, OSError, KeyError, AttributeError, AssertionError, ImportError),
    *(NotImplementedError, RecursionError, OverflowError, MemoryError),
)
"""Exceptions that Minari and Gymnasium raise for invalid metadata."""
Dataset: TypeAlias = str | minari.MinariDataset


@dataclass(frozen=True, eq=False)
class Source:
    """What is read of one dataset.

    Args:
        dataset: of Minari.
        selected: numbers of the episodes to read, in this order; None for all of the file.
    """

    dataset: minari.MinariDataset
    selected: tuple[int, ...] | None

    @property
    def id(self) -> str:
        """Its Minari id."""
        return self.dataset.id

    @property
    def file(self) -> Path:
        """Where its episodes are."""
        return Path(self.dataset.storage.data_path) / HDF5

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """As Minari keeps it."""
        return self.dataset.storage.metadata

    @property
    def episodes(self) -> Sequence[int]:
        """Numbers of the episodes to read."""
        return range(self.metadata["total_episodes"]) if self.selected is None else self.selected

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """Of the dataset."""
        return self.dataset.observation_space

    @property
    def action_space(self) -> spaces.Space[Any]:
        """Of the dataset."""
        return self.dataset.action_space

    @property
    def eval_env_spec(self) -> EnvSpec | None:
        """Environment to evaluate in; that of the data unless the dataset names another."""
        # Minari makes the environment of this spec, and offers no way to read it.
        return self.dataset._eval_env_spec or self.dataset.env_spec

    @property
    def has_jpeg(self) -> bool:
        """Whether its images went through JPEG, also those in a Dict or a Tuple."""
        return self.dataset.storage.jpeg_encoding and _has_image(self.observation_space)

    @property
    def identity(self) -> dict[str, Any]:
        """What the cache is keyed by: id, SHA-256 of the metadata, and of the choice of episodes."""
        metadata = (self.file.parent / METADATA_FILE_NAME).read_bytes()
        chosen = None if self.selected is None else _digest(repr(self.selected).encode())
        return {"id": self.id, "metadata_sha256": _digest(metadata), "episodes_sha256": chosen}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What shows at once that the file of the data is another: its size and time of change."""
        status = self.file.stat()
        return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def open_source(dataset: Dataset, download_missing: bool = False) -> Source:
    """Find a dataset by its id, or take one that was found; nothing of its episodes is read yet.

    Args:
        dataset: a Minari id, or a ``MinariDataset``, of which only the episodes that it points at are read.
        download_missing: whether an id that is not on this machine, or not whole, is downloaded.

    Raises:
        DatasetError: if it is unknown, empty, damaged, or not stored as HDF5.
        TypeError: if this is no dataset at all.
        ConnectionError: if it has to be downloaded and cannot be.
    """
    found = _find(dataset, download_missing) if isinstance(dataset, str) else dataset
    if not isinstance(found, minari.MinariDataset):
        raise TypeError(f"a dataset is a Minari id or a MinariDataset, got {dataset!r}")
    _check_format(found.id, found.storage.metadata)
    chosen = tuple(np.asarray(found.episode_indices).tolist())
    if not chosen:
        raise DatasetError(f"dataset {found.id} has no episodes; record some, or let the filter pass more")
    whole = chosen == tuple(range(found.storage.total_episodes))
    return Source(found, None if whole else chosen)


def _find(dataset_id: str, download_missing: bool) -> minari.MinariDataset:
    _check_id(dataset_id)
    folder = get_dataset_path(dataset_id)
    damage = find_damage(folder)
    if damage is not None and download_missing:
        download(dataset_id)
    elif not (folder / "data").exists():
        raise DatasetError(_unknown(dataset_id))
    elif damage is not None:
        raise DatasetError(_half_there(dataset_id, damage))
    _check_readable(dataset_id, folder)
    try:
        return minari.load_dataset(dataset_id)
    except _UNREADABLE as error:
        raise DatasetError(f"dataset {dataset_id} in {folder} cannot be opened: {_reason(error)}") from error


def _check_readable(dataset_id: str, folder: Path) -> None:
    """Reject metadata for which Minari would run code: it creates the environment if a space is missing.

    It also imports the reader of other formats, which is of no use here (`_check_format`).
    """
    metadata = json.loads((folder / "data" / METADATA_FILE_NAME).read_bytes())
    missing = [name for name in SPACES if not isinstance(metadata.get(name), str)]
    if missing:
        raise DatasetError(
            f"dataset {dataset_id} in {folder} cannot be opened: its metadata.json lacks {missing[0]}, which "
            f"is not asked of the environment, since to make that can run code. Record it again"
        )
    _check_format(dataset_id, metadata)


def _check_id(dataset_id: str) -> None:
    try:
        parse_dataset_id(dataset_id)
    except (ValueError, TypeError) as error:
        raise DatasetError(
            f"{dataset_id!r} is no Minari id; write namespace/name-v0, for example mujoco/hopper/medium-v0"
        ) from error


def _unknown(dataset_id: str) -> str:
    local = minari.list_local_datasets()
    near = ", ".join(get_close_matches(dataset_id, local, n=4)) or "none"
    return (
        f"dataset {dataset_id!r} is not in {get_dataset_path()} (near names: {near}). Download it with "
        f"download=True (--download), or set MINARI_DATASETS_PATH to the folder that holds it"
    )


def _half_there(dataset_id: str, damage: str) -> str:
    return (
        f"dataset {dataset_id} in {get_dataset_path(dataset_id)} cannot be opened: {damage}. Download it "
        f"again with download=True (--download), or record it again"
    )


def _check_format(dataset_id: str, metadata: dict[str, Any]) -> None:
    data_format = metadata.get("data_format", "hdf5")
    if data_format != "hdf5":
        raise DatasetError(
            f"dataset {dataset_id} is stored as {data_format}; only hdf5 is read, since Minari's reader of "
            f"other formats cuts episodes of 32,768 steps and more short. Record it with data_format='hdf5'"
        )


def _has_image(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return any(map(_has_image, parts_of(space).values()))
    return is_image_space(space)


def _reason(error: Exception) -> str:
    return str(error) or f"its metadata.json lacks what Minari needs ({type(error).__name__})"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
