"""Log files of a run, and their positions at a checkpoint, to continue from there."""

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
"""End of the names of event files that `replaced_events` writes."""
Row = dict[str, str]
"""A row of a CSV file, by column."""


@dataclass(frozen=True)
class LogPosition:
    """Amount of a log that was written at some moment.

    Args:
        rows: of ``progress.csv``, without its header.
        events: bytes of each file of TensorBoard events, by name.
    """

    rows: int = 0
    events: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    @described()
    def from_json(cls, document: Any) -> Self:
        """Read the result of `LogFiles.state`.

        Raises:
            CheckpointError: if it is something else.
        """
        rows, events = document["rows"], dict(document["events"])
        if not all(type(number) is int and number >= 0 for number in (rows, *events.values())):
            raise CheckpointError("its document of the log must hold whole numbers, at least 0")
        return cls(rows, events)


class LogFiles:
    """The log files of a run; their `state` is part of each checkpoint.

    It can be passed as ``beside`` to `Checkpoints`. Each line of the log is flushed when it is dumped, so the
    files hold all of it at any checkpoint.

    Args:
        folder: of the run.
        csv_name: name of the CSV file.
    """

    def __init__(self, folder: Path, csv_name: str):
        self.folder, self.csv_name = folder, csv_name

    def state(self) -> dict[str, Any]:
        """Return the current `LogPosition`, as JSON."""
        rows = len(read_rows(self.folder / self.csv_name))
        return {"rows": rows, "events": {file.name: file.stat().st_size for file in event_files(self.folder)}}

    def take_up(self, state: Any) -> None:
        """Do nothing: the logger of a resumed run was opened at this position."""


def read_rows(path: Path) -> list[Row]:
    """Return all rows of a ``progress.csv``, by column, without empty fields; none if there is no file.

    The last row is left out if the file ends in the middle of it.
    """
    if not path.exists():
        return []
    text = path.read_bytes().decode(errors="replace")
    whole = text[: text.rfind("\n") + 1]
    rows = csv.DictReader(io.StringIO(whole, newline=""))
    return [{name: value for name, value in row.items() if name and value} for row in rows]


def event_files(folder: Path) -> list[Path]:
    """Return the files of TensorBoard events in a folder, by name."""
    return sorted(folder.glob(EVENTS))


def cut_events(folder: Path, sizes: Mapping[str, int]) -> None:
    """Cut event files to their sizes at an earlier moment; files that did not exist then are removed.

    Symbolic links are not followed: they are removed.
    """
    for file in event_files(folder):
        if file.name not in sizes or file.is_symlink():
            file.unlink()
        elif file.stat().st_size > sizes[file.name]:
            os.truncate(file, sizes[file.name])


@contextmanager
def replaced_events(folder: Path) -> Iterator[SummaryWriter]:
    """Open a writer whose events replace those of an earlier call: a repeated step has no point twice.

    Events that others wrote into the folder stay.

    Args:
        folder: is made if it is missing.
    """
    for file in folder.glob(f"{EVENTS}{FINAL}"):
        file.unlink()
    with SummaryWriter(str(folder), filename_suffix=FINAL) as writer:
        yield writer
