"""The completion marker of a run: written last, after all files of the run are on the disk."""

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
    """Record that a run has completed: its number of steps, and the SHA-256 of each of its result files.

    Args:
        steps: steps or updates of the run.
        sha256: hexadecimal digests by the name of the file in the folder of the run.
    """

    steps: int
    sha256: dict[str, str]

    @classmethod
    def of(cls, folder: Path, steps: int, names: Sequence[str]) -> Self:
        """Describe a run that has completed; files that do not exist are left out."""
        present = [name for name in names if (folder / name).is_file()]
        return cls(steps, {name: _digest(folder / name) for name in present})

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the marker in the folder of a run; None if it has none, or one that cannot be read."""
        if not (folder / COMPLETED).is_file():
            return None
        try:
            found = load_json((folder / COMPLETED).read_bytes())
            steps, digests = found["steps"], dict(found["sha256"])
        except (ValueError, KeyError, TypeError):
            return None
        return cls(steps, digests) if type(steps) is int else None

    def write(self, folder: Path) -> None:
        """Write the marker into the folder of the run, whole or not at all.

        Raises:
            OSError: if it cannot be written.
        """
        text = dump_json({"steps": self.steps, "sha256": self.sha256}, indent=2)
        atomic_write(folder / COMPLETED, lambda handle: handle.write(text))

    def missing(self, folder: Path) -> list[str]:
        """Names of the result files that are gone."""
        return [name for name in self.sha256 if not (folder / name).is_file()]

    def changed(self, folder: Path) -> list[str]:
        """Names of the result files that were changed after the run, e.g. by ``rlxf calibrate``."""
        there = {name: digest for name, digest in self.sha256.items() if (folder / name).is_file()}
        return [name for name, digest in there.items() if _digest(folder / name) != digest]


def sync_files(files: Sequence[Path]) -> None:
    """Write the bytes of files to the disk, so that they survive a loss of power."""
    for file in files:
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())


def _digest(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
