"""Storage of recorded episodes: dtypes, disk space, and the write of a dataset."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import minari
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_dataset import parse_dataset_id
from minari.dataset.minari_storage import MinariStorage
from minari.namespace import create_namespace, list_local_namespaces
from minari.storage.datasets_root_dir import get_dataset_path

from rlxf.data.dataset_source import check_id
from rlxf.data.spaces import FLAT
from rlxf.utils.files import not_writable_by_others, temporary_folder


def storage_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of the stored observations (`stack`), in which float64 becomes float32.

    Raises:
        TypeError: if Minari does not support a part, such as text that is not a ``gymnasium.spaces.Text``,
            or HDF5 cannot store a key of a Dict as a name.
    """
    if isinstance(space, spaces.Dict):
        for key in space:
            _check_key(key, space)
        return spaces.Dict({key: storage_space(part) for key, part in space.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(map(storage_space, space))
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    if not isinstance(space, (*FLAT, spaces.Text)):
        raise TypeError(
            f"Minari does not support the space {space}: convert it to a gymnasium.spaces.Text, or remove it "
            f"with gymnasium.wrappers.FilterObservation"
        )
    return space


def _check_key(key: Any, space: spaces.Dict) -> None:
    if not isinstance(key, str) or key in ("", ".") or "/" in key or "\0" in key:
        raise TypeError(
            f"Minari cannot store an observation with the key {key!r} of {space}: a key must be a text other "
            f"than '.' with at least one character, and without '/'; rename it with "
            f"gymnasium.wrappers.TransformObservation"
        )


def stack(observations: Sequence[Any]) -> Any:
    """Stack T observations to an array (T, ...), nested like them; text to a list; float64 to float32."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: stack([observation[key] for observation in observations]) for key in first}
    if isinstance(first, tuple):
        return tuple(map(stack, zip(*observations, strict=True)))
    if isinstance(first, str):
        return list(observations)
    rows = np.stack(observations)
    return rows.astype(np.float32) if rows.dtype == np.float64 else rows


def first_non_finite(rows: Any) -> int | None:
    """Return the index of the first of T stacked observations with NaN or infinity, or None."""
    floats = [array for array in map(np.asarray, _arrays(rows)) if array.dtype.kind == "f"]
    finite = [np.isfinite(array.reshape(len(array), -1)).all(axis=1) for array in floats]
    return min((int(np.argmin(each)) for each in finite if not each.all()), default=None)


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
    arrays = (np.asarray(array) for episode in episodes for array in _arrays(vars(episode)))
    needed = sum(2 * array.nbytes + PER_ARRAY for array in arrays)  # chunks may be half empty
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


BATCH_SIZE = 64
"""Number of episodes that are held in memory and written together."""


def check_new(dataset_id: str) -> None:
    """Raise unless a dataset can be recorded under this id.

    Raises:
        ValueError: if it is not a Minari id.
        FileExistsError: if the dataset exists.
    """
    check_id(dataset_id)
    if get_dataset_path(dataset_id).exists():
        raise FileExistsError(
            f"dataset {dataset_id} exists in {get_dataset_path(dataset_id)}; to use it, leave out this step; "
            f"otherwise choose another name or version, or delete it first: minari delete {dataset_id}"
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
    root = get_dataset_path().resolve()
    with ExitStack() as stack:
        with _error_context(dataset_id):
            folder = stack.enter_context(temporary_folder(root)) / "dataset"
            (folder / "data").mkdir(parents=True)
            storage = MinariStorage.new(
                folder / "data", observation_space, action_space, env_spec, "hdf5", jpeg_encoding=False
            )
            storage.update_metadata(
                {"dataset_id": dataset_id, "minari_version": minari.__version__, **metadata}
            )
        iterator = _touching(folder, episodes)
        while batch := list(islice(iterator, BATCH_SIZE)):
            with _error_context(dataset_id):
                check_space(folder, batch)
                storage.update_episodes(batch)
        _publish(folder, dataset_id)
    return minari.load_dataset(dataset_id)


def _touching(folder: Path, episodes: Iterable[EpisodeBuffer]) -> Iterator[EpisodeBuffer]:
    """Yield episodes, and mark the folder as used, so that other processes do not take it for abandoned."""
    for episode in episodes:
        os.utime(folder)
        yield episode


def _publish(folder: Path, dataset_id: str) -> None:
    """Flush the files to disk and rename the folder to that of the dataset.

    Raises:
        FileExistsError: if another process has recorded the dataset in the meantime.
    """
    with _error_context(dataset_id):
        for path in (folder / "data").iterdir():
            with open(path, "rb") as handle:
                os.fsync(handle.fileno())
        namespace, _, _ = parse_dataset_id(dataset_id)
        if namespace is not None and namespace not in list_local_namespaces():
            create_namespace(namespace)
    try:
        os.rename(folder, get_dataset_path(dataset_id))
    except OSError:
        check_new(dataset_id)
        with _error_context(dataset_id):
            raise


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
