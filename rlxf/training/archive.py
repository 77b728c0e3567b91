"""Archives of tensors and JSON, sealed by SHA-256."""

import hashlib
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from rlxf.training.archive_reader import (
    MANIFEST,
    MAX_MEMBERS,
    MEMBER_NAME,
    SEAL_BYTES,
    describe_member,
    dump_manifest,
    read_members,
    seal,
)
from rlxf.training.serialization import check_tensors, dump_tensors
from rlxf.training.strict_json import dump_json
from rlxf.utils.errors import CheckpointError
from rlxf.utils.files import atomic_write

SHA256_DIGITS = re.compile("[0-9a-fA-F]{64}")
MAX_BYTES = 16 * 2**30
"""Default size of the largest file that is opened."""


@dataclass(frozen=True, eq=False)
class Archive:
    """Content of a checkpoint file.

    Args:
        documents: JSON values by name; "config" is the member ``config.json``.
        tensors: groups of named tensors by name; "policy" is the member ``policy.safetensors``.
    """

    documents: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for group in self.tensors.values() for tensor in group.values())


def write_archive(
    path: str | os.PathLike[str], documents: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Write a checkpoint file atomically; on an error, an existing file at ``path`` is unchanged.

    The file is a zip archive of the uncompressed members ``NAME.json``, ``NAME.safetensors`` and
    ``manifest.json``: ``{"format": "rlxf", "version": 1, "members": {name: {"sha256", "size"}}}``. The zip
    comment is the SHA-256 of all bytes before it. Equal content gives equal bytes. The file is written under
    a temporary name, synced to the disk and renamed (`atomic_write`).

    Args:
        path: the file; its folder must exist.
        documents: JSON values by name, at most 8 MiB each. Tuples are read back as lists.
        tensors: groups of tensors by name: dense, of bool, integer or float dtypes, on any device. They
            are read back on the CPU, contiguous, each with its own storage.

    Raises:
        TypeError: if a document is not JSON or a tensor cannot be stored; nothing is written.
        ValueError: if a document contains NaN or infinity, is too large, too deeply nested, or is named
            "manifest"; if a name is empty, longer than 100 characters or contains characters other than
            letters, digits, '_' and '-'; or if there are too many members. Nothing is written.
        OSError: if the file cannot be written, e.g. because the disk is full; the old file is unchanged.
    """
    texts = {f"{name}.json": _encode_document(name, document) for name, document in documents.items()}
    groups = {f"{name}.safetensors": group for name, group in tensors.items()}
    _check_names([*texts, *groups])
    for group in groups.values():
        check_tensors(group)
    atomic_write(path, lambda handle: _write_members(handle, texts, groups))


def read_archive(
    path: str | os.PathLike[str], max_bytes: int = MAX_BYTES, sha256: str | None = None
) -> Archive:
    """Read and validate a checkpoint file; no code in the file can run.

    The memory use stays below twice the size of the file plus the size of the parsed JSON. The latter is
    estimated before parsing and limited by `memory_budget`.

    Args:
        path: a file written by `write_archive`.
        max_bytes: size of the largest file that is opened, in bytes. The default of 16 GiB is far above the
            size of any agent, but limits the memory that a malicious file can fill.
        sha256: expected SHA-256 of the whole file, 64 hexadecimal digits, as ``sha256sum`` prints it. It
            is compared before anything is parsed. None accepts any file. The checksums inside of a file only
            detect damage: an attacker who alters a file can alter them, too.

    Raises:
        FileNotFoundError: if the file does not exist.
        IsADirectoryError: if ``path`` is a folder.
        CheckpointError: if the file is truncated, altered, too large, of a newer format, not written by
            rlxf, requires more memory than the budget, or does not have the expected SHA-256.
        ValueError: if ``sha256`` is not 64 hexadecimal digits.
    """
    path = Path(path)
    _check_digits(sha256)
    _check_is_file(path)
    with open(path, "rb") as handle:
        try:
            _check_digest(handle, sha256)
            members = read_members(handle, max_bytes)
        except ValueError as error:
            raise CheckpointError(f"cannot read checkpoint {path}: {error}") from error
    return Archive(_with_suffix(members, ".json"), _with_suffix(members, ".safetensors"))


def _check_digits(sha256: str | None) -> None:
    """Raise ValueError unless ``sha256`` is None or 64 hexadecimal digits."""
    if sha256 is not None and not (isinstance(sha256, str) and SHA256_DIGITS.fullmatch(sha256)):
        raise ValueError(f"sha256 must be 64 hexadecimal digits, as sha256sum prints them, got {sha256!r}")


def _check_digest(handle: BufferedReader, sha256: str | None) -> None:
    """Raise ValueError unless a file has the expected SHA-256.

    Args:
        handle: file handle at the start of the file; it is rewound to the start afterwards.
        sha256: expected hexadecimal digits, in upper or lower case. None accepts any file.
    """
    if sha256 is None:
        return
    actual = hashlib.file_digest(handle, "sha256").hexdigest()
    handle.seek(0)
    if actual != sha256.lower():
        raise ValueError(
            f"its SHA-256 is {actual}, but {sha256.lower()} is expected: it is another file; do not use it, "
            f"and obtain the expected file"
        )


def _encode_document(name: str, document: Any) -> bytes:
    try:
        return dump_json(document)
    except (TypeError, ValueError) as error:
        raise type(error)(f"document {name!r} cannot be stored: {error}") from error


def _check_names(names: list[str]) -> None:
    for name in names:
        if name == MANIFEST or not MEMBER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid member name; use letters, digits, '_' and '-'")
    if len(names) >= MAX_MEMBERS:
        raise ValueError(f"a checkpoint holds at most {MAX_MEMBERS - 1} members, got {len(names)}")


def _write_members(
    handle: BinaryIO, texts: dict[str, bytes], groups: dict[str, Mapping[str, Tensor]]
) -> None:
    entries = {}
    with zipfile.ZipFile(handle, "w") as archive:
        archive.comment = bytes(SEAL_BYTES)
        tensors = ((name, dump_tensors(group)) for name, group in groups.items())
        for name, data in chain(texts.items(), tensors):
            archive.writestr(_member_info(name), data)
            entries[name] = describe_member(data)
        archive.writestr(_member_info(MANIFEST), dump_manifest(entries))
    seal(handle)


def _member_info(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)
    member.create_system = 3  # the same bytes on every platform
    member.external_attr = 0o644 << 16
    return member


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the checkpoint file inside")
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}; check the path")
    if not path.is_file():
        raise CheckpointError(
            f"cannot read checkpoint {path}: it is not a regular file; copy its content to a regular file"
        )


def _with_suffix(members: dict[str, Any], suffix: str) -> dict[str, Any]:
    return {name.removesuffix(suffix): value for name, value in members.items() if name.endswith(suffix)}
