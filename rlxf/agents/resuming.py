"""Whether a training can go on from a file: what both agents ask of it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlxf.training import Archive, CheckpointError, CheckpointFolder, ResumeError
from rlxf.training.plain_json import dump_json, load_json
from rlxf.training.randomness import GROUP
from rlxf.utils.differences import first_difference


def newest_file(path: str | os.PathLike[str]) -> Path:
    """The file itself, or the newest whole one of a folder of `Checkpoints`.

    Raises:
        FileNotFoundError: if there is none in the folder.
    """
    return CheckpointFolder(Path(path)).newest() if Path(path).is_dir() else Path(path)


def check_resumable(archive: Archive, path: Path) -> None:
    """Raise CheckpointError unless the file holds the generators of a training."""
    if GROUP not in archive.tensors:
        raise CheckpointError(
            f"{path} keeps no generators, so no training goes on from it to the same bits: it was written by "
            f"save(), not by Checkpoints. Load it and learn on from there"
        )


def check_alike(own: Mapping[str, Any], other: Mapping[str, Any], path: Path) -> None:
    """Raise ResumeError unless an agent is built as the one in a file; the first difference is named."""
    own = load_json(dump_json(own))
    for name in sorted(own.keys() | other.keys()):
        if found := first_difference(name, other.get(name), own.get(name)):
            place, theirs, ours = found
            raise ResumeError(
                f"{path} cannot be resumed here: its {place} is {theirs}, the agent's {ours}; build the "
                f"agent as the run's, from the same data"
            )


def check_unfinished(done: int, wanted: int, what: str, path: Path) -> None:
    """Raise ResumeError if a file has all that is asked for; ``what`` names the argument that asks."""
    if wanted <= done:
        raise ResumeError(f"{path} has {done} of them already, got {what}={wanted}; ask for more to go on")
