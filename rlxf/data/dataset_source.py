"""Lookup, download and validation of Minari datasets before their episodes are read."""

import errno
import hashlib
import json
import os
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import h5py
import minari
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from huggingface_hub import constants
from minari.dataset.minari_dataset import parse_dataset_id
from minari.dataset.minari_storage import METADATA_FILE_NAME, is_image_space
from minari.namespace import NAMESPACE_METADATA_FILENAME
from minari.storage.datasets_root_dir import get_dataset_path
from minari.storage.remotes import DEFAULT_REMOTE
from PIL import Image

from rlxf.data.spaces import leaves
from rlxf.utils.errors import DatasetError
from rlxf.utils.files import not_writable_by_others, temporary_folder

HDF5 = "main_data.hdf5"
METADATA_BYTES = 4 * 2**20
"""Largest size of metadata in bytes: parsed Python objects take up to 40 times the size of their text."""
SPACES = ("observation_space", "action_space")
_UNREADABLE = (
    *(ValueError, TypeError, OSError, KeyError, AttributeError, AssertionError, ImportError),
    *(NotImplementedError, RecursionError, OverflowError, MemoryError, IndexError),
)
"""Exceptions that Minari and Gymnasium raise for invalid metadata."""
Dataset: TypeAlias = str | minari.MinariDataset


def local_ids() -> list[str]:
    """Return the ids of all datasets on this machine, sorted by namespace, name and version.

    Each folder with a subfolder ``data`` is a dataset, and its path is the id. Damaged datasets are included,
    and folders whose path is not a Minari id, which come last. Hidden folders and symbolic links to a folder
    above them are skipped.
    """
    root, found = get_dataset_path(), []
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
        raise TypeError(f"a dataset must be a Minari id or a MinariDataset, got {dataset!r}")
    _check_format(opened.id, opened.storage.metadata)
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
    check_id(dataset_id)
    folder = get_dataset_path(dataset_id)
    damage = find_damage(folder)
    if damage is not None and download_missing:
        download(dataset_id)
    elif damage is not None:
        raise DatasetError(_missing_message(dataset_id, folder, damage))
    _check_readable(dataset_id, folder)
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


def _check_readable(dataset_id: str, folder: Path) -> None:
    """Reject metadata of another id, or for which Minari would run code or take unbounded memory.

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
    _check_format(dataset_id, metadata)
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


def check_id(dataset_id: str) -> None:
    """Raise DatasetError if this is not a Minari id."""
    try:
        parse_dataset_id(dataset_id)
    except (ValueError, TypeError) as error:
        raise DatasetError(
            f"{dataset_id!r} is not a Minari id; write namespace/name-v0, for example "
            f"mujoco/hopper/medium-v0; a namespace has at least two characters"
        ) from error


def _check_format(dataset_id: str, metadata: dict[str, Any]) -> None:
    data_format = metadata.get("data_format", "hdf5")
    if data_format != "hdf5":
        raise DatasetError(
            f"dataset {dataset_id} is stored as {data_format}; only hdf5 is supported, since Minari's reader "
            f"of other formats truncates episodes of 32,768 or more steps. Record it with data_format='hdf5'"
        )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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


ROOT_VARIABLE = "MINARI_DATASETS_PATH"
"""Environment variable with Minari's dataset folder."""
TIMEOUT = 5.0
"""Timeout in seconds of the connection test."""


@not_writable_by_others()
def download(dataset_id: str) -> None:
    """Download a dataset into Minari's folder; an incomplete copy there is replaced.

    Minari writes file by file and treats an incomplete folder as a dataset. The download therefore goes to a
    temporary folder, from which complete datasets are moved. An interrupted download changes nothing. If two
    processes download at once, the second to finish keeps the files of the first.

    The connection to the server is tested first, since without a network Minari retries for 23 seconds
    before it raises an error.

    Raises:
        ConnectionError: if the server cannot be reached or the download is interrupted.
        DatasetError: if the server has no such dataset, or none that this version of Minari supports.
    """
    if os.environ.get("MINARI_REMOTE", DEFAULT_REMOTE).startswith("hf://"):
        _check_reachable(dataset_id, constants.ENDPOINT)
    root = get_dataset_path().resolve()
    with temporary_folder(root) as temporary:
        with _minari_root(temporary):
            _fetch(dataset_id)
            downloaded = list(minari.list_local_datasets())
        if damage := find_damage(temporary / dataset_id):
            raise ConnectionError(_interrupted(dataset_id, damage))
        for each in downloaded:
            _move_dataset(temporary / each, root / each, temporary)
        _move_namespaces(temporary, root)


@contextmanager
def _minari_root(folder: Path) -> Iterator[None]:
    """Set Minari's dataset folder for the duration of the context."""
    before = os.environ.get(ROOT_VARIABLE)
    os.environ[ROOT_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[ROOT_VARIABLE]
        if before is not None:
            os.environ[ROOT_VARIABLE] = before


def _fetch(dataset_id: str) -> None:
    try:
        minari.download_dataset(dataset_id)
    except ValueError as error:
        raise DatasetError(f"dataset {dataset_id} cannot be downloaded: {error}") from error
    except Exception as error:  # exception classes of Minari's dependencies differ between versions
        raise ConnectionError(_interrupted(dataset_id, str(error))) from error


def _move_dataset(folder: Path, target: Path, temporary: Path) -> None:
    """Rename a complete dataset to ``target``, unless ``target`` is a complete dataset already.

    An incomplete dataset at ``target`` is moved to ``temporary``.
    """
    if find_damage(folder) is not None or find_damage(target) is None:
        return
    if target.exists():
        os.rename(target, temporary / uuid4().hex)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(folder, target)
    except OSError:
        if find_damage(target) is not None:  # else another process has completed the download
            raise


def _move_namespaces(temporary: Path, root: Path) -> None:
    """Move Minari's metadata of namespaces that are new on this machine."""
    for file in temporary.rglob(NAMESPACE_METADATA_FILENAME):
        target = root / file.relative_to(temporary)
        if target.parent.is_dir() and not target.exists():
            os.rename(file, target)


def _check_reachable(dataset_id: str, url: str) -> None:
    try:
        urlopen(Request(url, method="HEAD"), timeout=TIMEOUT).close()
    except HTTPError:
        return  # any response shows that the server is reachable
    except OSError as error:
        raise ConnectionError(
            f"cannot download {dataset_id}: {url} cannot be reached ({error}). Connect to the network, or "
            f"copy the dataset to {get_dataset_path(dataset_id)}"
        ) from error


def _interrupted(dataset_id: str, reason: str) -> str:
    return (
        f"the download of {dataset_id} failed ({reason}); local files are unchanged. Try again with a "
        f"network connection and sufficient disk space"
    )
