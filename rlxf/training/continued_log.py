"""A log that goes on where a resumed run does: what was logged behind that point is taken back."""

import csv
import io
import os
from pathlib import Path

from stable_baselines3.common.logger import CSVOutputFormat, TensorBoardOutputFormat
from torch.utils.tensorboard import SummaryWriter

from rlxf.training.atomic import atomic_write

STEP = "time/total_timesteps"
"""The column that says how many steps were done, in every row."""


class ContinuedCSV(CSVOutputFormat):
    """Goes on with a ``progress.csv`` behind a step: later rows go, the header stays.

    Args:
        path: the file; it may be missing.
        step: the last one whose rows stay.
    """

    def __init__(self, path: str | os.PathLike[str], step: int):
        header, *rows = _read(Path(path)) or [[]]
        place = header.index(STEP) if STEP in header else None
        kept = [row for row in rows if place is not None and float(row[place] or 0) <= step]
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([header, *kept] if header else [])
        atomic_write(path, lambda handle: handle.write(text.getvalue().encode()))
        self.file = open(path, "r+")  # noqa: SIM115  # SB3's format closes it
        self.file.seek(0, os.SEEK_END)
        self.keys, self.separator, self.quotechar = header, ",", '"'


class ContinuedTensorBoard(TensorBoardOutputFormat):
    """Goes on with the events of a folder behind a step: TensorBoard drops later ones of earlier files.

    Args:
        folder: of the events.
        step: the last one that stays.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int):
        self.writer = SummaryWriter(log_dir=str(folder), purge_step=step + 1)
        self._is_closed = False


def _read(path: Path) -> list[list[str]]:
    """All rows, without the last one if the file ends amid it; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_bytes().decode(errors="replace")
    whole = text[: text.rfind("\n") + 1]
    return list(csv.reader(io.StringIO(whole, newline="")))
