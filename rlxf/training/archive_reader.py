"""Reader of the members of a checkpoint file, with validation of each member before it is parsed."""

import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from rlxf.training.manifest import MANIFEST, check_complete, check_unaltered, load_manifest
from rlxf.training.plain_json import MAX_JSON_BYTES, json_memory, load_json
from rlxf.training.tensor_bytes import load_tensors, tensors_memory
from rlxf.training.zip_layout import check_ends, check_members, check_seal
from rlxf.utils.memory_budget import check_budget

# Exceptions that `zipfile` raises for malformed archives.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
    EOFError,
    OSError,
    OverflowError,
    UnicodeDecodeError,
    struct.error,
)


def read_members(handle: BinaryIO, max_bytes: int) -> dict[str, Any]:
    """Return the members of a checkpoint by name: a JSON value for .json, tensors for .safetensors.

    The memory of parsed JSON, in addition to the bytes of the members, is limited by
    `rlxf.utils.memory_budget`. It is estimated before a member is parsed, and summed over the members.

    Raises:
        ValueError: if the file violates the format of rlxf, or requires more memory than the budget.
    """
    size = check_ends(handle, max_bytes)
    required: dict[str, int] = {}
    with _broken_zip("the directory"), zipfile.ZipFile(handle) as archive:
        _check_manifest(archive)
        check_members(archive.infolist(), size)  # before any compressed member could be read
        entries = _decode(MANIFEST, _read(archive, MANIFEST), load_manifest, required)
        check_complete(set(entries), set(archive.namelist()) - {MANIFEST})
        members = {name: _read_entry(archive, name, entry, required) for name, entry in entries.items()}
    check_seal(handle)
    return members


def _check_manifest(archive: zipfile.ZipFile) -> None:
    if MANIFEST not in archive.namelist():
        raise ValueError(f"it has no {MANIFEST}; it is incomplete or was not written by rlxf")
    size = archive.getinfo(MANIFEST).file_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"its {MANIFEST} of {size:,} bytes exceeds the limit of {MAX_JSON_BYTES:,}")


def _read_entry(archive: zipfile.ZipFile, name: str, entry: dict[str, Any], required: dict[str, int]) -> Any:
    data = _read(archive, name)
    check_unaltered(name, data, entry)
    return _decode(name, data, load_json if name.endswith(".json") else load_tensors, required)


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    with _broken_zip(f"the member {name!r}"):
        return archive.read(name)


@contextmanager
def _broken_zip(part: str) -> Iterator[None]:
    try:
        yield
    except _ZIP_ERRORS as error:
        raise ValueError(f"{part} is damaged ({error}); use another copy of the file") from error


def _decode(name: str, data: bytes, load: Callable[[bytes], Any], required: dict[str, int]) -> Any:
    required[f"the member {name!r}"] = json_memory(data) if name.endswith(".json") else tensors_memory(data)
    check_budget(required)
    try:
        return load(data)
    except ValueError as error:
        raise ValueError(f"the member {name!r} cannot be read: {error}") from error
