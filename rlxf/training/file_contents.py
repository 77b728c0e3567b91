"""Descriptions of the contents of files and folders, for messages about a wrong one."""

import os
from pathlib import Path
from typing import Any

from rlxf.training.archive import Archive, read_archive
from rlxf.utils.errors import CheckpointError
from rlxf.utils.names import similar_name
from rlxf.utils.run_files import CHECKPOINT, CONFIG

LOADERS = {
    "GTrXLPPO": "GTrXLPPO.load",
    "DecisionTransformer": "DecisionTransformer.load",
    "BehaviorCloning": "BehaviorCloning.load",
    "ReturnConditionedMLP": "ReturnConditionedMLP.load",
    "MaskedPretraining": "MaskedPretraining.load",
    "VecNormalize": "rlxf.training.load_normalizer",
}
"""Functions that load a file, by the name of its content."""
DEPTH = 2
"""Levels of subfolders that are searched for runs."""
MAX_LISTED = 12
"""Maximum number of runs that a message lists."""


def wrong_content_error(path: str | os.PathLike[str], archive: Archive, wanted: str) -> CheckpointError:
    """Return the error for a valid file that contains something other than ``wanted``."""
    return CheckpointError(f"{path} is valid, but contains no {wanted}: it contains {describe(archive)}")


def describe(archive: Archive) -> str:
    """Return a description of the content of a file and of the function that loads it."""
    name = _name(archive.documents)
    if name in LOADERS:
        content = "the statistics of a VecNormalize" if name == "VecNormalize" else f"a {name}"
        return f"{content}, which {LOADERS[name]} loads"
    members = ", ".join([*archive.documents, *archive.tensors]) or "nothing"
    return f"{members}, which rlxf.training.read_archive reads"


def describe_file(path: Path) -> str:
    """Return a description of the content of a file, or the error if rlxf cannot read it."""
    try:
        return f"it contains {describe(read_archive(path))}"
    except (CheckpointError, OSError) as error:
        return str(error)


def check_not_a_folder(path: str | os.PathLike[str], file: Path) -> None:
    """Raise IsADirectoryError if a folder is given instead of a file; suggest a checkpoint inside of it.

    Args:
        path: path as given by the user.
        file: the file that it denotes, with ".zip" added if the path has no suffix.
    """
    path = Path(path)
    if file.is_file() or not path.is_dir():
        return
    if (path / CHECKPOINT).is_file():
        raise IsADirectoryError(f"{path} is the folder of a run; give the file {path / CHECKPOINT}")
    example = "".join(f", such as {run / CHECKPOINT}" for run in _runs_in(path)[:1])
    raise IsADirectoryError(f"{path} is a folder; give a checkpoint file{example}")


def missing_path_advice(path: Path) -> str:
    """Return advice for the end of a message about a run folder or checkpoint file that does not exist.

    It is the path with the most similar name in the same folder, or to check the path.
    """
    siblings = (each for each in path.parent.glob("[!.]*") if each.exists())
    near = similar_name(path.name, [each.name for each in siblings if each.is_dir() or each.suffix == ".zip"])
    return f"; did you mean {path.parent / near}?" if near else "; check the path"


def no_run_folder_message(path: Path) -> str:
    """Return the error message for a folder that is not a run folder, with the run folders inside of it."""
    runs = _runs_in(path)
    if not runs:
        return f"{path} is not a run folder: it has no {CONFIG}; give the folder of a run"
    listed = ", ".join(str(run) for run in runs[:MAX_LISTED])
    more = f" and {len(runs) - MAX_LISTED} more" if len(runs) > MAX_LISTED else ""
    return f"{path} is not a run folder, but contains {len(runs)} of them: give one of {listed}{more}"


def _runs_in(path: Path) -> list[Path]:
    """Return the run folders inside of a folder, at most `DEPTH` levels deep, in sorted order."""
    levels = ["/".join("*" * depth) for depth in range(1, DEPTH + 1)]
    runs = {config.parent for level in levels for config in path.glob(f"{level}/{CONFIG}")}
    return sorted(run for run in runs if not run.name.startswith("."))  # hidden: temporary folders


def _name(documents: dict[str, Any]) -> str | None:
    for document in ("agent", "normalizer"):
        described = documents.get(document)
        if isinstance(described, dict) and isinstance(described.get("name"), str):
            return str(described["name"])
    return None
