"""Descriptions of the content of a file or folder and the function that opens it, for error messages."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlxf.training.archive import Archive, read_archive
from rlxf.training.errors import CheckpointError

CONFIG = "config.json"
CHECKPOINT = "checkpoint.zip"
LOADERS = {
    "GTrXLPPO": "GTrXLPPO.load",
    "DecisionTransformer": "DecisionTransformer.load",
    "MaskedPretraining": "MaskedPretraining.load",
    "VecNormalize": "rlxf.training.load_normalizer",
}
"""Functions that open a file, by the name of its content."""
DEPTH = 2
"""Levels of subfolders that are searched for runs."""
MOST = 12
"""Largest number of runs that a message lists."""


def misplaced(path: str | os.PathLike[str], archive: Archive, wanted: str) -> CheckpointError:
    """Return the error for a whole file without ``wanted``: what the file holds, and what opens it."""
    return CheckpointError(f"{path} is whole, but holds no {wanted}: it holds {describe(archive)}")


def describe(archive: Archive) -> str:
    """Return the content of a file and what opens it, e.g. for the end of a message."""
    name = _name(archive.documents)
    if name in LOADERS:
        what = "the statistics of a VecNormalize" if name == "VecNormalize" else f"a {name}"
        return f"{what}, which {LOADERS[name]} opens"
    members = ", ".join([*archive.documents, *archive.tensors]) or "nothing"
    return f"{members}, which rlxf.training.read_archive opens"


def describe_file(path: Path) -> str:
    """Return what a file holds and what opens it; why not, if it is no file of rlxf."""
    try:
        return f"it holds {describe(read_archive(path))}"
    except (CheckpointError, OSError) as error:
        return str(error)


def check_no_folder(path: str | os.PathLike[str], file: Path) -> None:
    """Raise IsADirectoryError if a folder was given for a file; a checkpoint inside is named.

    Args:
        path: as it was given.
        file: the file that it denotes, with ".zip" added where it has no suffix.
    """
    path = Path(path)
    if file.is_file() or not path.is_dir():
        return
    if (path / CHECKPOINT).is_file():
        raise IsADirectoryError(f"{path} is the folder of a run; give the file {path / CHECKPOINT}")
    raise IsADirectoryError(f"{path} is a folder; give a checkpoint file{_advice(path)}")


def no_run_folder(path: Path) -> str:
    """Return the message for a folder that is no run: the runs inside, if there are any."""
    found = list(runs_in(path))
    if not found:
        return f"{path} is no run folder: it has no {CONFIG}; give the folder of a run"
    shown = ", ".join(str(run) for run in found[:MOST])
    more = f" and {len(found) - MOST} more" if len(found) > MOST else ""
    return f"{path} is no run folder, but holds {len(found)}: give one of {shown}{more}"


def runs_in(path: Path) -> Iterator[Path]:
    """Yield the folders of runs inside a folder, at most `DEPTH` levels below it, sorted."""
    levels = ["/".join("*" * depth) for depth in range(1, DEPTH + 1)]
    found = {config.parent for level in levels for config in path.glob(f"{level}/{CONFIG}")}
    yield from sorted(run for run in found if not run.name.startswith("."))  # being made, or abandoned


def _name(documents: dict[str, Any]) -> str | None:
    for document in ("agent", "normalizer"):
        described = documents.get(document)
        if isinstance(described, dict) and isinstance(described.get("name"), str):
            return str(described["name"])
    return None


def _advice(path: Path) -> str:
    return "".join(f", such as {run / CHECKPOINT}" for run in list(runs_in(path))[:1])
