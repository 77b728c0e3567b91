"""Manifest of a checkpoint: format, format version, and the size and SHA-256 of each member."""

import hashlib
from typing import Any

from rlxf.training.plain_json import dump_json, load_json

MANIFEST = "manifest.json"
FORMAT = "rlxf"
VERSION = 1


def describe_member(data: bytes) -> dict[str, Any]:
    """Return the manifest entry of a member: ``{"sha256": hexadecimal digits, "size": bytes}``."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def dump_manifest(members: dict[str, dict[str, Any]]) -> bytes:
    """Return the JSON of ``{"format": "rlxf", "version": 1, "members": {name: entry}}``."""
    return dump_json({"format": FORMAT, "version": VERSION, "members": members})


def load_manifest(data: bytes) -> dict[str, dict[str, Any]]:
    """Return the manifest entries of the members by name.

    Raises:
        ValueError: if ``data`` is not a manifest of rlxf, or has another format version.
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
    return _check_entries(manifest.get("members"))


def check_complete(listed: set[str], present: set[str]) -> None:
    """Raise ValueError unless the listed members are exactly those present in the file."""
    if missing := sorted(listed - present):
        raise ValueError(f"the member {missing[0]!r} is missing; use another copy of the file")
    if extra := sorted(present - listed):
        raise ValueError(
            f"the member {extra[0]!r} is not listed in {MANIFEST}; the file is damaged, use another copy"
        )


def check_unaltered(name: str, data: bytes, entry: dict[str, Any]) -> None:
    """Raise ValueError unless the data of a member have the size and SHA-256 of its manifest entry."""
    actual = describe_member(data)
    for key in ("size", "sha256"):
        if actual[key] != entry[key]:
            altered = f"the member {name!r} is altered: its {key} is {actual[key]}, not {entry[key]}"
            raise ValueError(f"{altered}; use another copy of the file")


def _check_entries(members: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(members, dict):
        raise ValueError("it lists no members; use another copy of the file")
    for name, entry in members.items():
        if not isinstance(entry, dict) or entry.keys() != {"sha256", "size"}:
            raise ValueError(
                f"its entry {name!r} must have only 'sha256' and 'size'; use another copy of the file"
            )
    return members
