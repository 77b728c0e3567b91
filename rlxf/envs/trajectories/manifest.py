"""Manifest of a folder of converted arrays, and its verification."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlxf.envs.trajectories.array_file import ArrayFile, open_array
from rlxf.envs.trajectories.source import Source

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
        with open(folder / f"{name}.npy", "rb") as handle:
            if hashlib.file_digest(handle, "sha256").hexdigest() != entry["sha256"]:
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
