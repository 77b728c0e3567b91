"""Logs of a resumed run, without the entries after its checkpoint."""

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Self

from stable_baselines3.common.logger import (
    Figure,
    FormatUnsupportedError,
    HParam,
    Image,
    KVWriter,
    Video,
    filter_excluded_keys,
)

from rlxf.training.compat import checkpoint_errors
from rlxf.training.json_rules import whole
from rlxf.utils.errors import CheckpointError
from rlxf.utils.files import atomic_write, sync_file
from rlxf.utils.run_files import PROGRESS

EVENTS = "events.out.tfevents.*"
EVALUATION_EVENTS = ".evaluation"
"""Start of the suffix of event files of evaluations after the training, which a resumed run keeps."""
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
    @checkpoint_errors()
    def from_json(cls, document: Any) -> Self:
        """Read the result of `LogFiles.state`.

        Raises:
            CheckpointError: if the document is invalid.
        """
        rows = document["rows"]
        events = dict(document["events"])
        if not all(map(whole(0).holds, (rows, *events.values()))):
            raise CheckpointError("the log positions in the checkpoint must be integers from 0 to 2**63 - 1")
        return cls(rows, events)


class LogFiles:
    """Log files of a run; their `state` is part of each checkpoint.

    Implements `Stateful` for `CheckpointWriter`. Each row is flushed when it is logged, so the files are
    complete at any checkpoint.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def state(self) -> dict[str, Any]:
        """Return the current `LogPosition` as JSON."""
        rows = count_rows(self.folder / PROGRESS)
        return {"rows": rows, "events": {file.name: file.stat().st_size for file in event_files(self.folder)}}

    def sync(self) -> None:
        """Sync the files to the disk."""
        for file in filter(Path.is_file, [*event_files(self.folder), self.folder / PROGRESS]):
            with open(file, "rb+") as handle:
                sync_file(handle)

    def load_state(self, state: Any) -> None:
        """Do nothing: the logger of a resumed run is already opened at this position."""


MAX_LINE = 2**20
"""Maximum number of characters of a line that is read of a log."""


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a ``progress.csv`` of any size, by column, without empty fields.

    A missing file has no rows. An incomplete last row is omitted.

    Raises:
        ValueError: if a line is longer than `MAX_LINE`, or is no line of a CSV file.
    """
    rows = _csv_rows(path)
    names = next(rows, [])
    for row in rows:
        yield {name: value for name, value in zip(names, row, strict=False) if name and value}


def count_rows(path: Path) -> int:
    """Return the number of rows that `read_rows` yields, without the conversion to dictionaries."""
    return max(0, sum(1 for _ in _csv_rows(path)) - 1)


def _csv_rows(path: Path) -> Iterator[list[str]]:
    reader = csv.reader(_complete_lines(path), strict=True)
    try:
        yield from filter(None, reader)
    except csv.Error as error:
        raise ValueError(
            f"{path} line {reader.line_num} is damaged ({error}): correct or remove the line"
        ) from error


def _complete_lines(path: Path) -> Iterator[str]:
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        while (line := file.readline(MAX_LINE)).endswith(("\n", "\r")):
            yield line
        if len(line) == MAX_LINE:
            raise ValueError(
                f"{path} has a line of over {MAX_LINE:,} characters, the most that is read of a log"
            )


def event_files(folder: Path) -> list[Path]:
    """Return the TensorBoard event files of the training in a folder, sorted by name."""
    return sorted(file for file in folder.glob(EVENTS) if not file.suffix.startswith(EVALUATION_EVENTS))


def cut_events(folder: Path, sizes: Mapping[str, int]) -> None:
    """Truncate event files to earlier sizes; remove files without an entry in ``sizes``.

    Symbolic links are not followed but removed.
    """
    for file in event_files(folder):
        if file.name not in sizes or file.is_symlink():
            file.unlink()
        elif file.stat().st_size > sizes[file.name]:
            os.truncate(file, sizes[file.name])


STEP = "time/total_timesteps"
"""Name of the first column, the number of steps; every row has it."""
UNSUPPORTED = (Figure, HParam, Image, Video)


class ProgressCSV(KVWriter):
    """CSV log with a fixed order of columns: `STEP`, then all others sorted by name.

    Equal runs write equal files. (SB3's ``CSVOutputFormat`` appends new columns in the order of a set of
    strings, which differs from process to process.) A key that was not logged before adds a column: the
    file is then replaced as a whole, with empty fields in earlier rows.

    Args:
        path: the file; it may be missing.
        rows: number of rows of an existing file that are kept; later rows, and columns that only they use,
            are removed. 0 replaces the file.

    Raises:
        OSError: if the file cannot be written, e.g. because the disk is full.
    """

    def __init__(self, path: str | os.PathLike[str], rows: int = 0):
        self.path = Path(path)
        self._replace(lambda: islice(read_rows(self.path), rows))

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Append a row, unless all values are excluded.

        Raises:
            FormatUnsupportedError: for a figure, image, video or HParam that is not excluded from "csv".
        """
        values = filter_excluded_keys(key_values, key_excluded, "csv")
        for value in values.values():
            if isinstance(value, UNSUPPORTED):
                raise FormatUnsupportedError(["csv"], type(value).__name__.lower())
        # Python's csv writes a carriage return without quotes, and does not read it again.
        row = {name: str(value).replace("\r", " ") for name, value in values.items() if value is not None}
        if not row:
            return
        if row.keys() - set(self.columns):
            self.file.close()
            self._replace(lambda: chain(read_rows(self.path), [row]))
        else:
            _writer(self.file, self.columns).writerow(row)
            self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _replace(self, rows: Callable[[], Iterable[Row]]) -> None:
        """Replace the file by these rows, which are read twice: for their columns, and to copy them."""
        self.columns = sorted({name for row in rows() for name in row}, key=lambda name: (name != STEP, name))
        atomic_write(self.path, lambda handle: self._write_table(handle, rows()))
        self.file = open(self.path, "a", encoding="utf-8", newline="")  # noqa: SIM115  # `close` closes it

    def _write_table(self, handle: BinaryIO, rows: Iterable[Row]) -> None:
        text = io.TextIOWrapper(handle, "utf-8", newline="")
        table = _writer(text, self.columns)
        if self.columns:
            table.writeheader()
        table.writerows(rows)
        text.detach()  # flushes, and leaves the file open


def _writer(file: Any, columns: list[str]) -> "csv.DictWriter[str]":
    return csv.DictWriter(file, columns, lineterminator="\n")
