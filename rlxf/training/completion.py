"""Completion marker of a run, written after all other files of the run are on the disk."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlxf.training.atomic import atomic_write
from rlxf.training.plain_json import dump_json, load_json

COMPLETED = "completed.json"


@dataclass(frozen=True)
class Completion:
    """Completion marker of a run: its number of steps and the SHA-256 of each of its result files.

    Args:
        steps: steps or updates of the run.
        sha256: hexadecimal digests by name of the file in the run folder.
    """

    steps: int
    sha256: dict[str, str]

    @classmethod
    def of(cls, folder: Path, steps: int, names: Sequence[str]) -> Self:
        """Return the marker of a completed run; files that do not exist are omitted."""
        present = [name for name in names if (folder / name).is_file()]
        return cls(steps, {name: _digest(folder / name) for name in present})

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the marker in a run folder; None if it is missing or invalid."""
        if not (folder / COMPLETED).is_file():
            return None
        try:
            document = load_json((folder / COMPLETED).read_bytes())
            steps, digests = document["steps"], dict(document["sha256"])
        except (ValueError, KeyError, TypeError):
            return None
        return cls(steps, digests) if type(steps) is int else None

    def write(self, folder: Path) -> None:
        """Write the marker into the run folder atomically.

        Raises:
            OSError: if it cannot be written.
        """
        text = dump_json({"steps": self.steps, "sha256": self.sha256}, indent=2)
        atomic_write(folder / COMPLETED, lambda handle: handle.write(text))

    def missing(self, folder: Path) -> list[str]:
        """Return the names of the result files that no longer exist."""
        return [name for name in self.sha256 if not (folder / name).is_file()]

    def changed(self, folder: Path) -> list[str]:
        """Return the names of the result files that changed after the run, e.g. by ``rlxf calibrate``."""
        present = {name: digest for name, digest in self.sha256.items() if (folder / name).is_file()}
        return [name for name, digest in present.items() if _digest(folder / name) != digest]


def sync_files(files: Sequence[Path]) -> None:
    """Sync files to the disk, so that they survive a power failure."""
    for file in files:
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())


def _digest(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
