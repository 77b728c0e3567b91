"""Fetching a dataset from Minari's server: all of it or nothing."""

import os
import shutil
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

from rlxf.envs.trajectories.dataset_folder import find_damage
from rlxf.envs.trajectories.errors import DatasetError
from rlxf.utils.permissions import not_writable_by_others

ROOT = "MINARI_DATASETS_PATH"
"""The variable by which Minari is told where to keep datasets."""
TIMEOUT = 5.0
"""Seconds to wait for the server's first answer."""


@not_writable_by_others()
def download(dataset_id: str) -> None:
    """Download a dataset into Minari's folder, in place of one that is half there.

    Minari writes into its folder file by file, and takes whatever is there for the dataset. So it is sent to
    a hidden folder, from which what is whole is moved: what is cut leaves what was here as it was. Of two
    processes that download at once, the second to finish keeps what the first one brought.

    The server is asked for a sign of life first: without a network Minari itself tries again and again for
    23 seconds before it says so.

    Raises:
        ConnectionError: if the server cannot be reached, or the download breaks off.
        DatasetError: if the server has no such dataset, or none that this version of Minari reads.
    """
    if os.environ.get("MINARI_REMOTE", DEFAULT_REMOTE).startswith("hf://"):
        _check_reachable(dataset_id, constants.ENDPOINT)
    root = get_dataset_path().resolve()
    temporary = root / f".temporary-{uuid4().hex}"
    try:
        with _kept_in(temporary):
            _fetch(dataset_id)
            brought = list(minari.list_local_datasets())
        _check_whole(dataset_id, temporary / dataset_id)
        for each in brought:
            _put_in_place(temporary / each, root / each, temporary)
        _keep_namespaces(temporary, root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """Minari keeps its datasets there, for as long as this lasts."""
    before = os.environ.get(ROOT)
    os.environ[ROOT] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[ROOT]
        else:
            os.environ[ROOT] = before


def _fetch(dataset_id: str) -> None:
    try:
        minari.download_dataset(dataset_id)
    except ValueError as error:
        raise DatasetError(f"dataset {dataset_id} cannot be downloaded: {error}") from error
    except Exception as error:  # the libraries underneath change their classes of errors with each version
        raise ConnectionError(_broken_off(dataset_id, str(error))) from error


def _check_whole(dataset_id: str, folder: Path) -> None:
    damage = find_damage(folder)
    if damage is not None:
        raise ConnectionError(_broken_off(dataset_id, damage))


def _put_in_place(folder: Path, target: Path, temporary: Path) -> None:
    """Rename a whole one to ``target``, unless such is there; half a one there goes into ``temporary``."""
    if find_damage(folder) is not None or find_damage(target) is None:
        return
    if target.exists():
        os.rename(target, temporary / uuid4().hex)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(folder, target)
    except OSError:
        if find_damage(target) is not None:  # else another process was faster
            raise


def _keep_namespaces(temporary: Path, root: Path) -> None:
    """Move what Minari notes of the groups of datasets that are new here."""
    for file in temporary.rglob(NAMESPACE_METADATA_FILENAME):
        target = root / file.relative_to(temporary)
        if target.parent.is_dir() and not target.exists():
            os.rename(file, target)


def _check_reachable(dataset_id: str, url: str) -> None:
    try:
        urlopen(Request(url, method="HEAD"), timeout=TIMEOUT).close()
    except HTTPError:
        return  # an answer of any kind
    except OSError as error:
        raise ConnectionError(
            f"cannot download {dataset_id}: {url} gave no answer ({error}). Connect to the network, or copy "
            f"the dataset to {get_dataset_path(dataset_id)}"
        ) from error


def _broken_off(dataset_id: str, reason: str) -> str:
    return (
        f"the download of {dataset_id} broke off ({reason}); what was here is as it was. Try again, with a "
        f"network and room on the disk"
    )
