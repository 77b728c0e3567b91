"""Log files of a run and their positions at a checkpoint, for continuation after a resume."""

import csv
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from rlxf.training.described import described
from rlxf.training.errors import CheckpointError

EVENTS = "events.out.tfevents.*"
FINAL = ".final"
"""Suffix of the event files that `replaced_events` writes."""
Row = dict[str, str]
"""A row of a CSV file, by column."""


@dataclass(frozen=True)
class LogPosition:
    """Size of the logs of a run at a checkpoint.

    Args:
        rows: number of rows of ``progress.csv``, without its header.
        events: bytes of each TensorBoard event file, by name.
    """

    rows: int = 0
    events: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    @described()
    def from_json(cls, document: Any) -> Self:
        """Read the result of `LogFiles.state`.

        Raises:
            CheckpointError: if the document is invalid.
        """
        rows, events = document["rows"], dict(document["events"])
        if not all(type(number) is int and number >= 0 for number in (rows, *events.values())):
            raise CheckpointError("the log positions in the checkpoint must be integers of at least 0")
        return cls(rows, events)


class LogFiles:
    """Log files of a run; their `state` is part of each checkpoint.

    Implements `Stateful` for `Checkpoints`. Each row is flushed when it is logged, so the files are complete
    at any checkpoint.

    Args:
        folder: folder of the run.
        csv_name: name of the CSV file.
    """

    def __init__(self, folder: Path, csv_name: str):
        self.folder, self.csv_name = folder, csv_name

    def state(self) -> dict[str, Any]:
        """Return the current `LogPosition` as JSON."""
        rows = len(read_rows(self.folder / self.csv_name))
        return {"rows": rows, "events": {file.name: file.stat().st_size for file in event_files(self.folder)}}

    def take_up(self, state: Any) -> None:
        """Do nothing: the logger of a resumed run is already opened at this position."""


def read_rows(path: Path) -> list[Row]:
    """Return all rows of a ``progress.csv``, by column, without empty fields.

    A missing file has no rows. An incomplete last row is omitted.
    """
    if not path.exists():
        return []
    text = path.read_bytes().decode(errors="replace")
    complete = text[: text.rfind("\n") + 1]
    rows = csv.DictReader(io.StringIO(complete, newline=""))
    return [{name: value for name, value in row.items() if name and value} for row in rows]


def event_files(folder: Path) -> list[Path]:
    """Return the TensorBoard event files in a folder, sorted by name."""
    return sorted(folder.glob(EVENTS))


def cut_events(folder: Path, sizes: Mapping[str, int]) -> None:
    """Truncate event files to earlier sizes; remove files without an entry in ``sizes``.

    Symbolic links are not followed but removed.
    """
    for file in event_files(folder):
        if file.name not in sizes or file.is_symlink():
            file.unlink()
        elif file.stat().st_size > sizes[file.name]:
            os.truncate(file, sizes[file.name])


@contextmanager
def replaced_events(folder: Path) -> Iterator[SummaryWriter]:
    """Open a SummaryWriter whose events replace those of earlier calls, so that no step is logged twice.

    Event files of other writers in the folder are unchanged.

    Args:
        folder: folder of the events; it is created if it does not exist.
    """
    for file in folder.glob(f"{EVENTS}{FINAL}"):
        file.unlink()
    with SummaryWriter(str(folder), filename_suffix=FINAL) as writer:
        yield writer
