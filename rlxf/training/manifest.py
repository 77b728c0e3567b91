"""The manifest of a checkpoint: its format, its version and the size and SHA-256 of each member."""

import hashlib
from typing import Any

from rlxf.training.plain_json import dump_json, load_json

MANIFEST = "manifest.json"
FORMAT = "rlxf"
VERSION = 1


def describe_member(data: bytes) -> dict[str, Any]:
    """The manifest's entry for a member: ``{"sha256": hexadecimal digits, "size": bytes}``."""
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def dump_manifest(members: dict[str, dict[str, Any]]) -> bytes:
    """Write ``{"format": "rlxf", "version": 1, "members": {name: entry}}``."""
    return dump_json({"format": FORMAT, "version": VERSION, "members": members})


def load_manifest(data: bytes) -> dict[str, dict[str, Any]]:
    """Give the entries of the members by name.

    Raises:
        ValueError: if this is no manifest of rlxf, or one of another version.
    """
    manifest = load_json(data)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError("it does not say that the format is 'rlxf'; give a file written by rlxf")
    version = manifest.get("version")
    if version != VERSION or type(version) is not int:
        newer = type(version) is int and version > VERSION
        advice = "upgrade rlxf" if newer else "use another copy of the file"
        raise ValueError(f"the format version is {version!r}, this rlxf reads {VERSION}; {advice}")
    return _check_entries(manifest.get("members"))


def check_complete(listed: set[str], present: set[str]) -> None:
    """Raise ValueError unless the members that are listed are those that are there."""
    if missing := sorted(listed - present):
        raise ValueError(f"the member {missing[0]!r} is missing; use another copy of the file")
    if extra := sorted(present - listed):
        raise ValueError(
            f"the member {extra[0]!r} is not listed in {MANIFEST}; the file is damaged, use another copy"
        )


def check_unaltered(name: str, data: bytes, entry: dict[str, Any]) -> None:
    """Raise ValueError unless the data of a member are those that its entry describes."""
    found = describe_member(data)
    for what in ("size", "sha256"):
        if found[what] != entry[what]:
            altered = f"the member {name!r} is altered: its {what} is {found[what]}, not {entry[what]}"
            raise ValueError(f"{altered}; use another copy of the file")


def _check_entries(members: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(members, dict):
        raise ValueError("it lists no members; use another copy of the file")
    for name, entry in members.items():
        if not isinstance(entry, dict) or entry.keys() != {"sha256", "size"}:
            raise ValueError(f"its entry {name!r} is not a sha256 and a size; use another copy of the file")
    return members
