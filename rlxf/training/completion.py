"""Marker of a completed run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlxf.training.strict_json import load_json_file
from rlxf.utils.files import file_sha256
from rlxf.utils.run_files import BEST, BEST_NORMALIZER, BEST_VALIDATION, CHECKPOINT, COMPLETED, NORMALIZER

RESULTS = (CHECKPOINT, NORMALIZER, BEST, BEST_NORMALIZER, BEST_VALIDATION)
"""Names of the files that the completion marker lists, if they exist."""


@dataclass(frozen=True)
class Completion:
    """Completion marker of a run: its number of steps and the SHA-256 of each of its result files.

    Args:
        steps: steps or updates of the run.
        sha256: hexadecimal digests by name of the file in the run folder.
        ended_early: whether the training ended before the given number of steps, because an evaluation
            reached ``--stop-return``.
    """

    steps: int
    sha256: dict[str, str]
    ended_early: bool = False

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the marker in a run folder; None if it is missing or invalid, or a result file is missing."""
        found = cls.read_marker(folder)
        is_complete = found is not None and all((folder / name).is_file() for name in found.sha256)
        return found if is_complete else None

    @classmethod
    def read_marker(cls, folder: Path) -> Self | None:
        """Read the marker as `read`, also if result files are missing, e.g. in a copy of the logs only."""
        try:
            document = load_json_file(folder / COMPLETED)
            steps, digests = document["steps"], document["sha256"]
            ended_early = document.get("ended_early", False) is True
        except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            return None
        is_valid = type(steps) is int and isinstance(digests, dict) and digests.keys() <= {*RESULTS}
        return cls(steps, digests, ended_early) if is_valid else None

    def covers(self, total: int) -> bool:
        """Return whether the run needs no further training for a total of ``total`` steps or updates."""
        return self.steps >= total or self.ended_early

    def changed(self, folder: Path) -> list[str]:
        """Return the names of the result files that changed after the run, e.g. by ``rlxf calibrate``."""
        return [name for name, digest in self.sha256.items() if file_sha256(folder / name) != digest]
