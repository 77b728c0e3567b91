"""Download of Minari datasets."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import minari
from huggingface_hub import constants
from minari.namespace import NAMESPACE_METADATA_FILENAME
from minari.storage.datasets_root_dir import get_dataset_path
from minari.storage.remotes import DEFAULT_REMOTE

from rlxf.data.dataset_validation import find_damage
from rlxf.utils.errors import DatasetError
from rlxf.utils.files import not_writable_by_others, temporary_folder

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
