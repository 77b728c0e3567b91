"""Cache of converted datasets: its folders, and the checks and the conversion of a dataset."""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlxf.data.conversion import ArrayFile, convert, open_array
from rlxf.data.dataset_source import Source
from rlxf.utils.errors import DatasetError
from rlxf.utils.files import file_sha256, not_writable_by_others, temporary_folder, temporary_name

MANIFEST = "manifest.json"
FORMAT = "rlxf trajectories"
VERSION = 4
"""Version of the array format; caches of other versions are converted again."""
ATTEMPTS = 5
UNUSED_SECONDS = 7 * 24 * 3600
"""Time in seconds since the last load after which an outdated conversion is removed.

A process may still read an outdated conversion. On a network file system, it would crash if another machine
removed the files.
"""
MANIFEST_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Exceptions that a missing or malformed manifest raises."""


def cache_root() -> Path:
    """Return the root of all converted datasets: in RLXF_CACHE, else in XDG_CACHE_HOME, else in ~/.cache."""
    rlxf_cache, xdg_cache = os.environ.get("RLXF_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if rlxf_cache:
        return Path(rlxf_cache) / "trajectories"
    return (Path(xdg_cache) if xdg_cache else Path.home() / ".cache") / "rlxf" / "trajectories"


def cache_folder(sources: Sequence[Source]) -> Path:
    """Return the cache folder of these sources.

    Its name consists of the first id and a hash of all ids, metadata and selected episodes.
    """
    key = hashlib.sha256(json.dumps([source.identity for source in sources]).encode()).hexdigest()
    name = re.sub(r"[^\w.-]+", "-", sources[0].id)
    return cache_root() / f"{name}-{key[:16]}"


def ensure_converted(sources: Sequence[Source], verify: bool = False, progress_bar: bool = False) -> Path:
    """Return the folder with the arrays of the sources; convert them if they are not in the cache.

    Arrays are written to a temporary folder, synced to the disk, and renamed. An incomplete folder, left by
    a crash, a full disk or an interruption, is therefore never used. If two processes convert the same
    sources at once, the second to finish uses the folder of the first. After a conversion, those of earlier
    versions of the sources are removed if they were not loaded for `UNUSED_SECONDS`. The modification time of
    a manifest is that of the last load.

    Args:
        sources: datasets with equal spaces.
        verify: also read the whole cache and compare its SHA-256; else compare sizes, shapes and dtypes only.
        progress_bar: show a progress bar while converting.

    Raises:
        DatasetError, TypeError: as `convert`.
        OSError: if the disk is full or the cache is not writable.
    """
    folder = find_converted(sources, verify)
    if folder is not None:
        with suppress(OSError):  # the cache may belong to another user
            os.utime(folder / MANIFEST)
        return folder
    folder = cache_folder(sources)
    description = _convert_to(folder, sources, verify, progress_bar)
    _remove_outdated(folder, description)
    return folder


def _convert_to(
    folder: Path, sources: Sequence[Source], verify: bool, progress_bar: bool
) -> Mapping[str, Any]:
    """Convert the sources, write them to a folder, and return its manifest without the arrays."""
    try:
        with not_writable_by_others(), temporary_folder(folder.parent) as temporary:
            description = _manifest_of(sources)
            files = convert(sources, temporary, progress_bar)
            if description != _manifest_of(sources):
                raise DatasetError(f"dataset {sources[0].id} was replaced while it was read; try again")
            write_manifest(temporary, description, files)
            _publish(temporary, folder, sources, verify)
            return description
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write the converted dataset {sources[0].id} to {folder} ({error.strerror or error}); "
            f"partial files were deleted. Free some space, or set RLXF_CACHE to a folder on another disk",
        ) from error


def find_converted(sources: Sequence[Source], verify: bool = False) -> Path | None:
    """Return the folder with the arrays of the sources; None if it is missing, damaged or outdated.

    Args:
        sources: datasets with equal spaces.
        verify: as in `ensure_converted`.
    """
    folder = cache_folder(sources)
    return folder if _is_intact(folder, sources, verify) else None


def _is_intact(folder: Path, sources: Sequence[Source], verify: bool) -> bool:
    """Return whether the folder is a complete conversion of the current sources.

    The check compares the manifest, and size, shape and dtype of the arrays. ``verify`` adds the SHA-256 of
    the arrays, which reads all of them.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        arrays = manifest.pop("arrays").items()
        return manifest == _manifest_of(sources) and all(
            _is_array_intact(folder / f"{name}.npy", entry, verify) for name, entry in arrays
        )
    except MANIFEST_ERRORS:
        return False


def _is_array_intact(path: Path, entry: dict[str, Any], verify: bool) -> bool:
    if path.stat().st_size != entry["size"]:
        return False
    array = open_array(path)
    same_form = (list(array.shape), array.dtype.name) == (entry["shape"], entry["dtype"])
    return same_form and (not verify or file_sha256(path) == entry["sha256"])


def _publish(temporary: Path, folder: Path, sources: Sequence[Source], verify: bool) -> None:
    """Rename ``temporary`` to ``folder``, unless another process has completed the folder in the meantime."""
    for _ in range(ATTEMPTS):
        try:
            return os.rename(temporary, folder)
        except OSError:
            if _is_intact(folder, sources, verify):
                return None
            _remove(folder)
    return os.rename(temporary, folder)


def _remove_outdated(folder: Path, description: Mapping[str, Any]) -> None:
    """Remove unused conversions of earlier versions of the sources, with the same selected episodes.

    Args:
        folder: folder of the current conversion.
        description: manifest of the current conversion, without its arrays.
    """
    name = folder.name.rpartition("-")[0]
    for path in folder.parent.glob(f"{name}-*/{MANIFEST}"):
        with suppress(*MANIFEST_ERRORS):
            manifest = json.loads(path.read_text(encoding="utf-8"))
            unused = time.time() - path.stat().st_mtime > UNUSED_SECONDS
            if unused and path.parent != folder and _selections(manifest) == _selections(description):
                _remove(path.parent)


def _selections(manifest: Mapping[str, Any]) -> list[Any]:
    """Return the format, and id and selection of episodes of each source, without their version."""
    return [manifest["format"], *((each["id"], each["episodes_sha256"]) for each in manifest["sources"])]


def _remove(folder: Path) -> None:
    """Remove a folder; it is renamed first, so that no process finds it partly deleted."""
    trash = temporary_name(folder.parent)
    try:
        os.rename(folder, trash)
    except FileNotFoundError:
        return  # another process has removed it
    shutil.rmtree(trash, ignore_errors=True)


def write_manifest(folder: Path, description: Mapping[str, Any], files: Sequence[ArrayFile]) -> None:
    """Write ``manifest.json`` with the sources, and size, SHA-256, shape and dtype of each array.

    Args:
        folder: folder of the arrays.
        description: result of `_manifest_of` before the sources were read.
        files: the arrays.

    Raises:
        OSError: if the disk is full.
    """
    manifest = dict(description) | {"arrays": {file.path.stem: file.describe() for file in files}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _manifest_of(sources: Sequence[Source]) -> dict[str, Any]:
    """Return the manifest without the arrays: format, and identity and fingerprint of each source."""
    identities = [source.identity | source.fingerprint for source in sources]
    return {"format": FORMAT, "version": VERSION, "sources": identities}
