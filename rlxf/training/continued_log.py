"""A log that goes on where a resumed run does: what was logged behind that point is taken back."""

import csv
import io
import os
from pathlib import Path

from stable_baselines3.common.logger import CSVOutputFormat, TensorBoardOutputFormat
from torch.utils.tensorboard import SummaryWriter

from rlxf.training.atomic import atomic_write


def count_rows(path: str | os.PathLike[str]) -> int:
    """Rows of a CSV file behind its header; 0 if there is none."""
    return max(0, len(_read(Path(path))) - 1) if Path(path).exists() else 0


class ContinuedCSV(CSVOutputFormat):
    """Goes on behind the first rows of a ``progress.csv``. Later ones go, the header stays.

    Args:
        path: the file; it may be missing.
        rows: how many rows stay.
    """

    def __init__(self, path: str | os.PathLike[str], rows: int):
        lines = _read(Path(path))[: rows + 1] if Path(path).exists() else []
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(lines)
        atomic_write(path, lambda handle: handle.write(text.getvalue().encode()))
        self.file = open(path, "r+")  # noqa: SIM115  # SB3's format closes it
        self.file.seek(0, os.SEEK_END)
        self.keys = lines[0] if lines else []
        self.separator, self.quotechar = ",", '"'


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
    """All rows, without the last one if the file ends amid it."""
    text = path.read_bytes().decode(errors="replace")
    whole = text[: text.rfind("\n") + 1]
    return list(csv.reader(io.StringIO(whole, newline="")))
