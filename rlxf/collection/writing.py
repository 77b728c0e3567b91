"""Atomic writing of Minari datasets."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import minari
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_dataset import parse_dataset_id
from minari.dataset.minari_storage import MinariStorage
from minari.namespace import create_namespace, list_local_namespaces
from minari.storage.datasets_root_dir import get_dataset_path

from rlxf.collection.disk_space import check_space
from rlxf.utils.permissions import not_writable_by_others

AT_ONCE = 64
"""Number of episodes that are held in memory and written together."""


def check_new(dataset_id: str) -> None:
    """Raise unless a dataset can be recorded under this id.

    Raises:
        ValueError: if it is not a Minari id.
        FileExistsError: if the dataset exists.
    """
    try:
        parse_dataset_id(dataset_id)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{dataset_id!r} is not a Minari id; write namespace/name-v0, for example rlxf/tmaze/mixed-v0"
        ) from error
    if get_dataset_path(dataset_id).exists():
        raise FileExistsError(
            f"dataset {dataset_id} exists in {get_dataset_path(dataset_id)}; choose another name or version, "
            f"or delete it first: minari delete {dataset_id}"
        )


@not_writable_by_others()
def write_dataset(
    dataset_id: str,
    episodes: Iterable[EpisodeBuffer],
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    env_spec: EnvSpec | None,
    metadata: dict[str, Any],
) -> minari.MinariDataset:
    """Write episodes to a new HDF5 dataset in batches, images losslessly, and return the dataset.

    The files are in a hidden folder that is renamed at the end; a failure leaves no files.

    Args:
        dataset_id: new Minari id.
        episodes: at least one episode; errors of the iterable propagate.
        observation_space: space of the observations.
        action_space: space of the actions.
        env_spec: spec of the environment; None if unknown.
        metadata: additional metadata with the keys of Minari.

    Raises:
        OSError: if the disk is full or not writable.
        FileExistsError: if the dataset exists.
    """
    check_new(dataset_id)
    # Minari joins a relative folder with itself when it computes the size of the dataset, so it is absolute.
    folder = get_dataset_path().resolve() / f".temporary-{uuid4().hex}"
    try:
        with _error_context(dataset_id):
            (folder / "data").mkdir(parents=True)
            storage = MinariStorage.new(
                folder / "data", observation_space, action_space, env_spec, "hdf5", jpeg_encoding=False
            )
            storage.update_metadata(
                {"dataset_id": dataset_id, "minari_version": minari.__version__, **metadata}
            )
        for batch in _batches(episodes):
            with _error_context(dataset_id):
                check_space(folder, batch)
                storage.update_episodes(batch)
        with _error_context(dataset_id):
            _publish(folder, dataset_id)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return minari.load_dataset(dataset_id)


def _batches(episodes: Iterable[EpisodeBuffer]) -> Iterator[list[EpisodeBuffer]]:
    iterator = iter(episodes)
    while batch := list(islice(iterator, AT_ONCE)):
        yield batch


def _publish(folder: Path, dataset_id: str) -> None:
    """Flush the files to disk and rename the folder to that of the dataset."""
    for path in (folder / "data").iterdir():
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
    namespace, _, _ = parse_dataset_id(dataset_id)
    if namespace is not None and namespace not in list_local_namespaces():
        create_namespace(namespace)
    os.rename(folder, get_dataset_path(dataset_id))


@contextmanager
def _error_context(dataset_id: str) -> Iterator[None]:
    """Add the dataset and its folder to errors of the disk. HDF5 raises RuntimeError for some of them."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise OSError(
            f"cannot write dataset {dataset_id} to {get_dataset_path()} ({reason}); its files were removed. "
            f"Free some space, or set MINARI_DATASETS_PATH to a folder on another disk"
        ) from error
