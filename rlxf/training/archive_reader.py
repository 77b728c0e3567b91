"""Reader of archives: layout of the zip file, manifest and members, all checked before use."""

import hashlib
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from rlxf.training.serialization import load_tensors, tensors_memory
from rlxf.training.strict_json import MAX_JSON_BYTES, dump_json, json_memory, load_json
from rlxf.utils.memory_budget import check_budget

MANIFEST = "manifest.json"
"""Name of the member that lists the others."""
FORMAT = "rlxf"
VERSION = 1
MAX_MEMBERS = 1000
MAX_DIRECTORY_BYTES = 2**18
"""Size of the largest zip directory that is read, enough for `MAX_MEMBERS` of the longest names."""
SEAL_BYTES = 64
"""Length of the zip comment, a SHA-256 in hexadecimal digits."""
MEMBER_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}\.(json|safetensors)")

_CHUNK = 2**20
"""Number of bytes that are read at a time."""
_END = struct.Struct("<4s8xII2x")
"""End record of a zip file: signature, size of the directory, its offset."""
_END64 = struct.Struct("<4s36xQQ")
"""End record of a large zip file (zip64), with the same fields."""
_LOCATOR = struct.Struct("<4s4xQ4x")
"""Locator of the zip64 end record: signature, offset of the record."""
# Exceptions that `zipfile` raises for malformed archives.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
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
    size = _check_ends(handle, max_bytes)
    required: dict[str, int] = {}
    with _broken_zip("the directory"), zipfile.ZipFile(handle) as archive:
        _check_manifest(archive)
        _check_members(archive.infolist(), size)  # before any compressed member could be read
        entries = _decode(MANIFEST, _read(archive, MANIFEST), _load_manifest, required)
        _check_complete(set(entries), set(archive.namelist()) - {MANIFEST})
        members = {name: _read_entry(archive, name, entry, required) for name, entry in entries.items()}
    _check_seal(handle)
    return members


def _check_manifest(archive: zipfile.ZipFile) -> None:
    if MANIFEST not in archive.namelist():
        raise ValueError(f"it has no {MANIFEST}; it is incomplete or was not written by rlxf")
    size = archive.getinfo(MANIFEST).file_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"its {MANIFEST} of {size:,} bytes exceeds the limit of {MAX_JSON_BYTES:,}")


def _read_entry(archive: zipfile.ZipFile, name: str, entry: dict[str, Any], required: dict[str, int]) -> Any:
    data = _read(archive, name)
    _check_unaltered(name, data, entry)
    return _decode(name, data, load_json if name.endswith(".json") else load_tensors, required)


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    with _broken_zip(f"the member {name!r}"):
        return archive.read(name)


@contextmanager
def _broken_zip(part: str) -> Iterator[None]:
    try:
        yield
    except _ZIP_ERRORS as error:
        raise _damaged(f"{part} cannot be read ({error})") from error


def _decode(name: str, data: bytes, load: Callable[[bytes], Any], required: dict[str, int]) -> Any:
    required[f"the member {name!r}"] = json_memory(data) if name.endswith(".json") else tensors_memory(data)
    check_budget(required)
    try:
        return load(data)
    except ValueError as error:
        raise ValueError(f"the member {name!r} cannot be read: {error}") from error


def _damaged(fault: str) -> ValueError:
    return ValueError(f"{fault}; use another copy of the file")


def seal(handle: BinaryIO) -> None:
    """Write the seal into the comment of a zip file, its last 64 bytes."""
    digest = _digest_before_seal(handle)
    handle.seek(-SEAL_BYTES, 2)
    handle.write(digest)


def _check_seal(handle: BinaryIO) -> None:
    """Raise ValueError if the seal does not match the bytes before it."""
    digest = _digest_before_seal(handle)
    handle.seek(-SEAL_BYTES, 2)
    if handle.read() != digest:
        raise _damaged("bytes between its members were altered")


def _check_ends(handle: BinaryIO, max_bytes: int) -> int:
    """Check the first and last bytes of a checkpoint file, and return its size in bytes.

    This function reads a few hundred bytes only, for any content of the file. Afterwards, the zip directory
    has at most 256 KiB.

    Raises:
        ValueError: if the file is larger than ``max_bytes``, is not a zip file, is a Stable-Baselines3 zip
            file, is truncated, or was not written by rlxf.
    """
    size = handle.seek(0, 2)
    if size > max_bytes:
        raise ValueError(f"its {size:,} bytes exceed max_bytes={max_bytes:,}; raise it if you trust the file")
    _check_start(handle)
    directory = _directory_bytes(handle, size)
    if directory > MAX_DIRECTORY_BYTES:
        raise ValueError(f"its directory of {directory:,} bytes exceeds the limit of {MAX_DIRECTORY_BYTES:,}")
    return size


def _check_members(members: list[zipfile.ZipInfo], file_size: int) -> None:
    """Raise ValueError unless members are uncompressed, unique, with valid names, and fit into the file."""
    seen: set[str] = set()
    for member in members:
        name = member.orig_filename
        if not MEMBER_NAME.fullmatch(name):
            raise _damaged(f"the member {name!r} is neither JSON nor safetensors")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise _damaged(f"the member {name!r} is compressed, unlike those of rlxf")
        if member.filename in seen:
            raise _damaged(f"the member {member.filename!r} is duplicated")
        seen.add(member.filename)
    if sum(member.file_size for member in members) > file_size:
        raise _damaged("its members declare more bytes than the file has")


def _check_start(handle: BinaryIO) -> None:
    handle.seek(0)
    start = handle.read(34)
    if not start.startswith(b"PK\x03\x04"):
        raise ValueError("it is not a zip file; give a file written by rlxf")
    if start[26:28] == b"\x04\x00" and start[30:] == b"data":  # the first member of every SB3 zip
        raise ValueError(
            "it is a Stable-Baselines3 file, which is not opened as it contains pickles, which can run code; "
            "if you trust its author, rlxf.import_sb3(path, trust=True) reads it"
        )


def _directory_bytes(handle: BinaryIO, size: int) -> int:
    end = size - SEAL_BYTES - 22
    if end < 0:
        raise _damaged(f"it is truncated after {size} bytes")
    handle.seek(end)
    tail = handle.read()
    signature, directory, _ = _END.unpack(tail[: _END.size])
    if signature != b"PK\x05\x06" or not re.fullmatch(rb"@\x00[0-9a-f]{64}", tail[20:]):
        raise _damaged("it is truncated or was not written by rlxf")
    return _zip64_directory_bytes(handle, end) or directory


def _zip64_directory_bytes(handle: BinaryIO, end: int) -> int:
    """Return the directory size in the zip64 record of a file beyond 4 GiB; 0 without this record."""
    record = end - _LOCATOR.size - _END64.size
    if record < 0:
        return 0
    handle.seek(record)
    signature, directory, _ = _END64.unpack(handle.read(_END64.size))
    locator, offset = _LOCATOR.unpack(handle.read(_LOCATOR.size))
    if locator != b"PK\x06\x07":
        return 0
    if signature != b"PK\x06\x06" or offset != record:
        raise _damaged("its zip64 record is not where rlxf writes it")
    return directory


def _digest_before_seal(handle: BinaryIO) -> bytes:
    remaining = handle.seek(0, 2) - SEAL_BYTES
    handle.seek(0)
    digest = hashlib.sha256()
    while chunk := handle.read(min(_CHUNK, remaining)):
        digest.update(chunk)
        remaining -= len(chunk)
    return digest.hexdigest().encode()


def describe_member(data: bytes) -> dict[str, Any]:
    """Return the manifest entry of a member: ``{"sha256": hexadecimal digits, "size": bytes}``."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def dump_manifest(members: dict[str, dict[str, Any]]) -> bytes:
    """Return the JSON of ``{"format": "rlxf", "version": 1, "members": {name: entry}}``."""
    return dump_json({"format": FORMAT, "version": VERSION, "members": members})


def _load_manifest(data: bytes) -> dict[str, dict[str, Any]]:
    """Return the manifest entries of the members by name.

    Raises:
        ValueError: if ``data`` is not a manifest of rlxf, or has a different format version.
    """
    manifest = load_json(data)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError("its \"format\" is not 'rlxf'; give a file written by rlxf")
    version = manifest.get("version")
    if version != VERSION or type(version) is not int:
        newer = type(version) is int and version > VERSION
        advice = "upgrade rlxf" if newer else "use another copy of the file"
        raise ValueError(
            f"its format version is {version!r}, but this rlxf reads version {VERSION}; {advice}"
        )
    members = manifest.get("members")
    if not isinstance(members, dict):
        raise _damaged("it lists no members")
    for name, entry in members.items():
        if not isinstance(entry, dict) or entry.keys() != {"sha256", "size"}:
            raise _damaged(f"its entry {name!r} must have only 'sha256' and 'size'")
    return members


def _check_complete(listed: set[str], present: set[str]) -> None:
    """Raise ValueError unless the listed members are exactly those present in the file."""
    if missing := sorted(listed - present):
        raise _damaged(f"the member {missing[0]!r} is missing")
    if extra := sorted(present - listed):
        raise _damaged(f"the member {extra[0]!r} is not listed in {MANIFEST}")


def _check_unaltered(name: str, data: bytes, entry: dict[str, Any]) -> None:
    """Raise ValueError unless the data of a member have the size and SHA-256 of its manifest entry."""
    actual = describe_member(data)
    for key in ("size", "sha256"):
        if actual[key] != entry[key]:
            raise _damaged(f"the member {name!r} is altered: its {key} is {actual[key]}, not {entry[key]}")
