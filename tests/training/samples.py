"""Sample checkpoint contents and crafted zip files for tests."""

import hashlib
import json
import os
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from rlxf.training import read_archive, write_archive

DOCUMENTS = {"config": {"width": 64, "name": "gтrxl", "none": None}, "spaces": [1, 2.5, True, "inf"]}
TENSORS = {
    "policy": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.zeros(3, dtype=torch.float64)},
    "optimizer": {"step": torch.tensor(7)},
}


def write_sample(path: Path) -> bytes:
    write_archive(path, DOCUMENTS, TENSORS)
    return path.read_bytes()


def same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and torch.equal(first[name], second[name])
        for name in first
    )


def holds_sample(path: Path) -> bool:
    archive = read_archive(path)
    return archive.documents == DOCUMENTS and all(
        same_tensors(archive.tensors[group], TENSORS[group]) for group in TENSORS
    )


def manifest_of(contents: dict[str, bytes], **changes: Any) -> bytes:
    entries = {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        for name, data in contents.items()
    }
    return json.dumps({"format": "rlxf", "version": 1, "members": entries, **changes}).encode()


def sealed_zip(members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip file with a valid seal, as an attacker who knows the format can write it."""
    file = BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.comment = bytes(64)
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, compression)
    return reseal(file.getvalue())


def reseal(data: bytes) -> bytes:
    return data[:-64] + hashlib.sha256(data[:-64]).hexdigest().encode()


def crafted(members: dict[str, bytes]) -> bytes:
    """Return a sealed zip file with a valid manifest of its members."""
    return sealed_zip([*members.items(), ("manifest.json", manifest_of(members))])


def files_in(folder: Path) -> set[str]:
    return set(os.listdir(folder))
