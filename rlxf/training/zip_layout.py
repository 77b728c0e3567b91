"""Validation of the zip layout of a checkpoint, before and in addition to `zipfile`.

The members of a checkpoint are stored without compression under plain names. The zip comment is the seal:
the SHA-256, in hexadecimal digits, of all bytes before the comment. Sizes in the file therefore equal sizes
in memory, and a change of any byte, including time stamps, is detected.

Layout of the end of a zip file: PKWARE APPNOTE.TXT 6.3.10, sections 4.3.14 to 4.3.16.
"""

import hashlib
import re
import struct
import zipfile
from typing import BinaryIO

MAX_MEMBERS = 1000
MAX_DIRECTORY_BYTES = 2**18  # room for MAX_MEMBERS of the longest names
SEAL_BYTES = 64
MEMBER_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}\.(json|safetensors)")

_CHUNK = 2**20
_END = struct.Struct("<4s8xII2x")  # signature, size of the directory, its offset
_END64 = struct.Struct("<4s36xQQ")
_LOCATOR = struct.Struct("<4s4xQ4x")  # signature, offset of the zip64 end record


def seal(handle: BinaryIO) -> None:
    """Write the seal into the comment of a zip file, its last 64 bytes."""
    digest = _digest_before_seal(handle)
    handle.seek(-SEAL_BYTES, 2)
    handle.write(digest)


def check_seal(handle: BinaryIO) -> None:
    """Raise ValueError if the seal does not match the bytes before it."""
    digest = _digest_before_seal(handle)
    handle.seek(-SEAL_BYTES, 2)
    if handle.read() != digest:
        raise ValueError("bytes between its members were altered; use another copy of the file")


def check_ends(handle: BinaryIO, max_bytes: int) -> int:
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


def check_members(members: list[zipfile.ZipInfo], file_size: int) -> None:
    """Raise ValueError unless members are uncompressed, unique, with valid names, and fit into the file."""
    seen: set[str] = set()
    for member in members:
        _check_member(member)
        if member.filename in seen:
            raise ValueError(
                f"the member {member.filename!r} is duplicated; the file is damaged, use another copy"
            )
        seen.add(member.filename)
    if sum(member.file_size for member in members) > file_size:
        raise ValueError(
            "its members declare more bytes than the file has; the file is damaged, use another copy"
        )


def _check_member(member: zipfile.ZipInfo) -> None:
    name = member.orig_filename
    if not MEMBER_NAME.fullmatch(name):
        raise ValueError(
            f"the member {name!r} is neither JSON nor safetensors; the file is damaged, use another copy"
        )
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise ValueError(
            f"the member {name!r} is compressed, unlike those of rlxf; the file is damaged, use another copy"
        )


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
        raise ValueError(f"it is truncated after {size} bytes; use another copy of the file")
    handle.seek(end)
    tail = handle.read()
    signature, directory, _ = _END.unpack(tail[: _END.size])
    if signature != b"PK\x05\x06" or not re.fullmatch(rb"@\x00[0-9a-f]{64}", tail[20:]):
        raise ValueError("it is truncated or was not written by rlxf; use another copy of the file")
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
        raise ValueError(
            "its zip64 record is not where rlxf writes it; the file is damaged, use another copy"
        )
    return directory


def _digest_before_seal(handle: BinaryIO) -> bytes:
    remaining = handle.seek(0, 2) - SEAL_BYTES
    handle.seek(0)
    digest = hashlib.sha256()
    while chunk := handle.read(min(_CHUNK, remaining)):
        digest.update(chunk)
        remaining -= len(chunk)
    return digest.hexdigest().encode()
