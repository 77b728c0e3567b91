"""A log that goes on where a resumed run does: what was logged after that point is removed."""

import csv
import io
import os
from pathlib import Path

from stable_baselines3.common.logger import CSVOutputFormat, TensorBoardOutputFormat
from torch.utils.tensorboard import SummaryWriter

from rlxf.training.atomic import atomic_write
from rlxf.training.log_files import LogPosition, cut_events, read_rows


class ContinuedCSV(CSVOutputFormat):
    """Goes on with a ``progress.csv`` after so many rows: later rows are removed, the header stays.

    Args:
        path: the file; it may be missing.
        position: its first rows stay. Without any, the header goes, too.
    """

    def __init__(self, path: str | os.PathLike[str], position: LogPosition):
        header, *rows = (read_rows(Path(path)) if position.rows else []) or [[]]
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([header, *rows[: position.rows]] if header else [])
        atomic_write(path, lambda handle: handle.write(text.getvalue().encode()))
        self.file = open(path, "r+")  # noqa: SIM115  # SB3's format closes it
        self.file.seek(0, os.SEEK_END)
        self.keys, self.separator, self.quotechar = header, ",", '"'


class ContinuedTensorBoard(TensorBoardOutputFormat):
    """Goes on with the events of a folder: later ones are cut off.

    A TensorBoard that has read them drops them, too.

    Args:
        folder: of the events.
        position: how much of each file stays.
        step: the last one that stays.
    """

    def __init__(self, folder: str | os.PathLike[str], position: LogPosition, step: int):
        cut_events(Path(folder), position.events)
        self.writer = SummaryWriter(log_dir=str(folder), purge_step=step + 1)
        self._is_closed = False
