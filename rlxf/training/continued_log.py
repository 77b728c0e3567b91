"""Logs of a run: a CSV file with a fixed order of columns, and continuation after a resume."""

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import (
    Figure,
    FormatUnsupportedError,
    HParam,
    Image,
    KVWriter,
    TensorBoardOutputFormat,
    Video,
    filter_excluded_keys,
)
from torch.utils.tensorboard import SummaryWriter

from rlxf.training.atomic import atomic_write

STEP = "time/total_timesteps"
"""The column that says how many steps were done, in every row. It is the first one."""
PICTURES = (Figure, HParam, Image, Video)
Row = dict[str, str]


class ProgressCSV(KVWriter):
    """A CSV log whose columns have a fixed order: `STEP`, then all others sorted by name.

    Equal runs write equal files. (SB3's ``CSVOutputFormat`` appends new columns in the order of a set of
    strings, which differs from process to process.) A key that was not logged before adds a column: the
    file is then replaced as a whole, with empty fields in earlier rows.

    Args:
        path: the file; it is replaced.
        rows: what it begins with, by column.

    Raises:
        OSError: if it cannot be written, e.g. the disk is full.
    """

    def __init__(self, path: str | os.PathLike[str], rows: Iterable[Row] = ()):
        self.path = Path(path)
        self._replace(list(rows))

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Append a row.

        Raises:
            FormatUnsupportedError: for a figure, a video and the like that is not excluded from "csv".
        """
        logged = filter_excluded_keys(key_values, key_excluded, "csv")
        for value in logged.values():
            if isinstance(value, PICTURES):
                raise FormatUnsupportedError(["csv"], type(value).__name__.lower())
        row = {name: str(value) for name, value in logged.items() if value is not None}
        if row.keys() - set(self.columns):
            self.file.close()
            self._replace([*read_rows(self.path), row])
        else:
            _writer(self.file, self.columns).writerow(row)
            self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _replace(self, rows: list[Row]) -> None:
        self.columns = sorted({name for row in rows for name in row}, key=lambda name: (name != STEP, name))
        text = io.StringIO(newline="")
        table = _writer(text, self.columns)
        if self.columns:
            table.writeheader()
        table.writerows(rows)
        atomic_write(self.path, lambda handle: handle.write(text.getvalue().encode()))
        self.file = open(self.path, "a", newline="")  # noqa: SIM115  # `close` closes it


class ContinuedCSV(ProgressCSV):
    """Goes on with a ``progress.csv`` after a step: later rows go, and columns that only they had.

    Args:
        path: the file; it may be missing.
        step: the last one whose rows stay.
    """

    def __init__(self, path: str | os.PathLike[str], step: int):
        super().__init__(path, [row for row in read_rows(path) if STEP in row and float(row[STEP]) <= step])


class ContinuedTensorBoard(TensorBoardOutputFormat):
    """Goes on with the events of a folder behind a step: TensorBoard drops later ones of earlier files.

    Args:
        folder: of the events.
        step: the last one that stays.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int):
        self.writer = SummaryWriter(log_dir=str(folder), purge_step=step + 1)
        self._is_closed = False


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """All rows of a ``progress.csv``, by column, without empty fields; none if there is no file.

    The last row is left out if the file ends in the middle of it.
    """
    if not Path(path).exists():
        return []
    text = Path(path).read_bytes().decode(errors="replace")
    whole = text[: text.rfind("\n") + 1]
    rows = csv.DictReader(io.StringIO(whole, newline=""))
    return [{name: value for name, value in row.items() if name and value} for row in rows]


def _writer(file: Any, columns: list[str]) -> "csv.DictWriter[str]":
    return csv.DictWriter(file, columns, lineterminator="\n")
