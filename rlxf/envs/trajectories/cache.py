"""Where converted arrays are kept, and how they get there whole."""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from rlxf.envs.trajectories.conversion import convert
from rlxf.envs.trajectories.manifest import find_altered, find_fault, write_manifest
from rlxf.envs.trajectories.source import Source
from rlxf.utils.permissions import not_writable_by_others

TEMPORARY = ".temporary-"
ABANDONED = 24 * 3600.0
"""Seconds after which a temporary folder belongs to a process that was killed."""
ATTEMPTS = 5


def cache_root() -> Path:
    """The folder of all caches of this kind: in RLXF_CACHE, else in XDG_CACHE_HOME, else in ~/.cache."""
    own, shared = os.environ.get("RLXF_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own) / "trajectories"
    return (Path(shared) if shared else Path.home() / ".cache") / "rlxf" / "trajectories"


def cache_folder(sources: Sequence[Source]) -> Path:
    """The folder for these sources: named by the first id and a hash of all ids, metadata and choices."""
    key = hashlib.sha256(json.dumps([source.identity for source in sources]).encode()).hexdigest()
    name = re.sub(r"[^\w.-]+", "-", sources[0].id)
    return cache_root() / f"{name}-{key[:16]}"


def ensure_converted(sources: Sequence[Source], verify: bool = False, progress_bar: bool = False) -> Path:
    """The folder with the arrays of the sources, converted now unless it was before.

    Arrays are written to a folder of another name, synced to the disk, and renamed. What a crash, a full
    disk or an interruption leaves behind is never taken for whole. Of two processes that convert at once,
    the second to finish takes the folder of the first.

    Args:
        sources: datasets with equal spaces.
        verify: read the whole cache and compare its SHA-256, too; else sizes, shapes and dtypes alone.
        progress_bar: show one while converting.

    Raises:
        DatasetError, TypeError: as `convert`.
        OSError: if the disk is full or the cache cannot be written.
    """
    folder = cache_folder(sources)
    if _is_whole(folder, sources, verify):
        return folder
    try:
        _convert(folder, sources, verify, progress_bar)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {sources[0].id}, converted, to {folder} ({error.strerror or error}); nothing is "
            f"left of it. Free some space, or set RLXF_CACHE to a folder on another disk",
        ) from error
    return folder


def _is_whole(folder: Path, sources: Sequence[Source], verify: bool) -> bool:
    return find_fault(folder, sources) is None and not (verify and find_altered(folder))


@not_writable_by_others()
def _convert(folder: Path, sources: Sequence[Source], verify: bool, progress_bar: bool) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    temporary = folder.with_name(f"{TEMPORARY}{uuid4().hex}")
    temporary.mkdir()
    try:
        files = convert(sources, temporary, progress_bar)
        write_manifest(temporary, sources, files)
        _put_in_place(temporary, folder, sources, verify)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: Path, folder: Path, sources: Sequence[Source], verify: bool) -> None:
    """Rename to ``folder``, unless another process has put a whole one there meanwhile."""
    for _ in range(ATTEMPTS):
        try:
            return os.rename(temporary, folder)
        except OSError:
            if _is_whole(folder, sources, verify):
                return None
            _remove(folder)
    return os.rename(temporary, folder)


def _remove(folder: Path) -> None:
    """Take a folder away under another name first: half of it must not be found."""
    aside = folder.with_name(f"{TEMPORARY}{uuid4().hex}")
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return  # another process was faster
    shutil.rmtree(aside, ignore_errors=True)


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):  # another process may be removing it too
            if time.time() - folder.stat().st_mtime > ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)
