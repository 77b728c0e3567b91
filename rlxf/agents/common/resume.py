"""Checks of checkpoint files for resuming a training run, shared by both agents."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlxf.training import Archive, CheckpointError, CheckpointFolder, ResumeError
from rlxf.training.compat import first_difference
from rlxf.training.serialization import dump_json, load_json
from rlxf.training.state_checks import RNG_GROUP


def newest_checkpoint_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file itself, or the newest complete file of a folder of `CheckpointWriter`.

    Raises:
        FileNotFoundError: if the folder has no complete file.
    """
    return CheckpointFolder(Path(path)).newest() if Path(path).is_dir() else Path(path)


def check_resumable(archive: Archive, path: Path) -> None:
    """Raise CheckpointError unless the file holds the random number generators of a training run."""
    if RNG_GROUP not in archive.tensors:
        raise CheckpointError(
            f"{path} was written by save(), not by CheckpointWriter, and holds no states of random number "
            f"generators, so a training cannot be resumed exactly. Load the agent and call learn() instead"
        )


def check_same_settings(own: Mapping[str, Any], other: Mapping[str, Any], path: Path) -> None:
    """Raise ResumeError unless an agent has the settings of the one in a file; name the first difference.

    Args:
        own: settings of the agent.
        other: settings in the file.
        path: path of the file, for the message.
    """
    own = load_json(dump_json(own))
    for name in sorted(own.keys() | other.keys()):
        if difference := first_difference(name, other.get(name), own.get(name)):
            place, stored, current = difference
            raise ResumeError(
                f"{path} cannot be resumed here: its {place} is {stored}, the agent's {current}; build "
                f"the agent with the arguments and the data of the run"
            )


def check_unfinished(done: int, wanted: int, what: str, path: Path) -> None:
    """Raise ResumeError if the run in a file has reached its target already.

    Args:
        done: progress of the run in the file.
        wanted: progress to reach in total.
        what: name of the argument that sets the target, for the message.
        path: path of the file, for the message.
    """
    if wanted <= done:
        raise ResumeError(
            f"the run in {path} has reached {done} already, got {what}={wanted}; use a larger {what} to "
            f"continue"
        )
