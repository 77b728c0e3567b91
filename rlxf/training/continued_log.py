"""Log writers of a run: CSV with a fixed order of columns, and continuation of logs after a resume."""

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
from rlxf.training.log_files import LogPosition, Row, cut_events, read_rows

STEP = "time/total_timesteps"
"""Name of the first column, the number of steps; every row has it."""
UNSUPPORTED = (Figure, HParam, Image, Video)


class ProgressCSV(KVWriter):
    """CSV log with a fixed order of columns: `STEP`, then all others sorted by name.

    Equal runs write equal files. (SB3's ``CSVOutputFormat`` appends new columns in the order of a set of
    strings, which differs from process to process.) A key that was not logged before adds a column: the
    file is then replaced as a whole, with empty fields in earlier rows.

    Args:
        path: the file; an existing file is replaced.
        rows: initial rows, by column.

    Raises:
        OSError: if the file cannot be written, e.g. because the disk is full.
    """

    def __init__(self, path: str | os.PathLike[str], rows: Iterable[Row] = ()):
        self.path = Path(path)
        self._replace(list(rows))

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Append a row.

        Raises:
            FormatUnsupportedError: for a figure, image, video or HParam that is not excluded from "csv".
        """
        values = filter_excluded_keys(key_values, key_excluded, "csv")
        for value in values.values():
            if isinstance(value, UNSUPPORTED):
                raise FormatUnsupportedError(["csv"], type(value).__name__.lower())
        row = {name: str(value) for name, value in values.items() if value is not None}
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
    """Continue a ``progress.csv`` at a position; later rows, and columns that only they use, are removed.

    Args:
        path: the file; it may be missing.
        position: position with the number of rows that are kept.
    """

    def __init__(self, path: str | os.PathLike[str], position: LogPosition):
        super().__init__(path, read_rows(Path(path))[: position.rows])


class ContinuedTensorBoard(TensorBoardOutputFormat):
    """Continue the TensorBoard events of a folder at a position; later events are removed.

    A running TensorBoard discards the later events, too (``purge_step``).

    Args:
        folder: folder of the events.
        position: position with the size of each event file that is kept.
        step: last step that is kept.
    """

    def __init__(self, folder: str | os.PathLike[str], position: LogPosition, step: int):
        cut_events(Path(folder), position.events)
        self.writer = SummaryWriter(log_dir=str(folder), purge_step=step + 1)
        self._is_closed = False


def _writer(file: Any, columns: list[str]) -> "csv.DictWriter[str]":
    return csv.DictWriter(file, columns, lineterminator="\n")
