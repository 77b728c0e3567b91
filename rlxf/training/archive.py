"""A checkpoint file: a zip of JSON and safetensors with a SHA-256 of each member. No pickle, ever."""

import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from rlxf.training.archive_reader import read_members
from rlxf.training.atomic import atomic_write
from rlxf.training.digest import check_digest, check_digits
from rlxf.training.errors import CheckpointError
from rlxf.training.manifest import MANIFEST, describe_member, dump_manifest
from rlxf.training.plain_json import dump_json
from rlxf.training.tensor_bytes import check_tensors, dump_tensors
from rlxf.training.zip_layout import MAX_MEMBERS, MEMBER_NAME, SEAL_BYTES, seal

MAX_BYTES = 16 * 2**30


@dataclass(frozen=True, eq=False)
class Archive:
    """The content of a checkpoint file.

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
    """Write a checkpoint file, or leave the one at ``path`` as it is.

    The file is a zip of ``NAME.json`` and ``NAME.safetensors`` members, stored and not deflated, and of
    ``manifest.json``: ``{"format": "rlxf", "version": 1, "members": {name: {"sha256", "size"}}}``. Its
    comment is the SHA-256 of all bytes before it. Equal content gives equal bytes. It is written under
    a temporary name, synced and renamed (`atomic_write`).

    Args:
        path: the file; its folder must exist.
        documents: JSON values by name, at most 8 MiB each. Tuples come back as lists.
        tensors: groups of tensors by name: dense, of bool, integer or float dtypes, on any device. They
            come back on the CPU, contiguous, each with its own storage.

    Raises:
        TypeError: if a document is no JSON or a tensor cannot be stored; nothing is written.
        ValueError: if a document holds NaN or infinity, or a name is "manifest" or has other characters than
            letters, digits, '_' and '-'; nothing is written.
        OSError: if the file cannot be written, e.g. the disk is full; the old file is unchanged.
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
    """Read a checkpoint file and check all of it; no code in it can run.

    Memory stays below twice the size of the file plus that of the parsed JSON, which is estimated before it
    is parsed and stays within the budget of `memory_budget`.

    Args:
        path: a file written by `write_archive`.
        max_bytes: largest file, in bytes, that is opened. The default, 16 GiB, is far above any agent and
            still keeps a hostile file from filling the memory of a large machine.
        sha256: SHA-256 that the whole file must have, 64 hexadecimal digits, as ``sha256sum`` prints it. It
            is compared before anything is parsed. None to take any file. The checksums inside a file show
            damage only: an attacker who alters a file can alter them, too.

    Raises:
        FileNotFoundError: if there is no file.
        IsADirectoryError: if ``path`` is a folder.
        CheckpointError: if the file is truncated, altered, foreign, too large or of a newer format, requires
            more memory than the budget, or its SHA-256 is another.
        ValueError: if ``sha256`` is not 64 hexadecimal digits.
    """
    path = Path(path)
    check_digits(sha256)
    _check_is_file(path)
    with open(path, "rb") as handle:
        try:
            check_digest(handle, sha256)
            members = read_members(handle, max_bytes)
        except ValueError as error:
            raise CheckpointError(f"cannot read checkpoint {path}: {error}") from error
    return Archive(_with_suffix(members, ".json"), _with_suffix(members, ".safetensors"))


def _encode_document(name: str, document: Any) -> bytes:
    try:
        return dump_json(document)
    except (TypeError, ValueError) as error:
        raise type(error)(f"document {name!r} cannot be stored: {error}") from error


def _check_names(names: list[str]) -> None:
    for name in names:
        if name == MANIFEST or not MEMBER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a member; use letters, digits, '_' and '-'")
    if len(names) >= MAX_MEMBERS:
        raise ValueError(f"a checkpoint holds at most {MAX_MEMBERS - 1} members, got {len(names)}")


def _write_members(
    handle: BinaryIO, texts: dict[str, bytes], groups: dict[str, Mapping[str, Tensor]]
) -> None:
    listed = {}
    with zipfile.ZipFile(handle, "w") as archive:
        archive.comment = bytes(SEAL_BYTES)
        for name, data in _encoded(texts, groups):
            archive.writestr(_stored(name), data)
            listed[name] = describe_member(data)
        archive.writestr(_stored(MANIFEST), dump_manifest(listed))
    seal(handle)


def _encoded(texts: dict[str, bytes], groups: dict[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, bytes]]:
    yield from texts.items()
    for name, group in groups.items():
        yield name, dump_tensors(group)


def _stored(name: str) -> zipfile.ZipInfo:
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
        raise CheckpointError(f"cannot read checkpoint {path}: it is no regular file; copy it to one")


def _with_suffix(members: dict[str, Any], suffix: str) -> dict[str, Any]:
    return {name.removesuffix(suffix): value for name, value in members.items() if name.endswith(suffix)}
