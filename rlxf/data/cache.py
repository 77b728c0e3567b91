"""Cache of converted datasets, with a manifest that identifies each."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlxf.data.conversion import ArrayFile, convert, open_array
from rlxf.data.dataset_source import Source
from rlxf.utils.files import file_sha256, not_writable_by_others, temporary_folder, temporary_name

MANIFEST = "manifest.json"
FORMAT = "rlxf trajectories"
VERSION = 2
"""Version of the array format; caches of other versions are converted again."""


def write_manifest(folder: Path, sources: Sequence[Source], files: Sequence[ArrayFile]) -> None:
    """Write ``manifest.json`` with the sources, and size, SHA-256, shape and dtype of each array.

    Raises:
        OSError: if the disk is full.
    """
    arrays = {file.path.stem: file.describe() for file in files}
    manifest = {"format": FORMAT, "version": VERSION, "sources": describe_sources(sources), "arrays": arrays}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def describe_sources(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return identity and fingerprint of each source."""
    return [source.identity | source.fingerprint for source in sources]


def find_fault(folder: Path, sources: Sequence[Source]) -> str | None:
    """Describe why the folder is not a complete conversion of the current sources; return None if it is.

    The check compares the manifest, and size, shape and dtype of the arrays. It does not read their values.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            return f"it has version {manifest['version']} of {manifest['format']}, not {VERSION}"
        if manifest["sources"] != describe_sources(sources):
            return "the dataset has changed since"
        return next(filter(None, (_form_fault(folder, *item) for item in manifest["arrays"].items())), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error) or type(error).__name__


def find_altered(folder: Path) -> str | None:
    """Describe an array whose SHA-256 differs from the manifest; return None if all match.

    This reads all arrays. Call `find_fault` first, which detects missing files.
    """
    arrays = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["arrays"]
    for name, entry in arrays.items():
        if file_sha256(folder / f"{name}.npy") != entry["sha256"]:
            return f"{name}.npy is altered"
    return None


def _form_fault(folder: Path, name: str, entry: dict[str, Any]) -> str | None:
    path = folder / f"{name}.npy"
    size = path.stat().st_size
    if size != entry["size"]:
        return f"{path.name} has {size} bytes, not {entry['size']}"
    array = open_array(path)
    form = list(array.shape), array.dtype.name
    return None if form == (entry["shape"], entry["dtype"]) else f"{path.name} has another shape or dtype"


ATTEMPTS = 5


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
    sources at once, the second to finish uses the folder of the first.

    Args:
        sources: datasets with equal spaces.
        verify: also read the whole cache and compare its SHA-256; else compare sizes, shapes and dtypes only.
        progress_bar: show a progress bar while converting.

    Raises:
        DatasetError, TypeError: as `convert`.
        OSError: if the disk is full or the cache is not writable.
    """
    folder = cache_folder(sources)
    if _is_intact(folder, sources, verify):
        return folder
    try:
        _convert(folder, sources, verify, progress_bar)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write the converted dataset {sources[0].id} to {folder} ({error.strerror or error}); "
            f"partial files were deleted. Free some space, or set RLXF_CACHE to a folder on another disk",
        ) from error
    return folder


def _is_intact(folder: Path, sources: Sequence[Source], verify: bool) -> bool:
    return find_fault(folder, sources) is None and not (verify and find_altered(folder))


@not_writable_by_others()
def _convert(folder: Path, sources: Sequence[Source], verify: bool, progress_bar: bool) -> None:
    with temporary_folder(folder.parent) as temporary:
        files = convert(sources, temporary, progress_bar)
        write_manifest(temporary, sources, files)
        _publish(temporary, folder, sources, verify)


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


def _remove(folder: Path) -> None:
    """Remove a folder; it is renamed first, so that no process finds it partly deleted."""
    trash = temporary_name(folder.parent)
    try:
        os.rename(folder, trash)
    except FileNotFoundError:
        return  # another process has removed it
    shutil.rmtree(trash, ignore_errors=True)
