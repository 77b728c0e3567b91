"""Every run is a folder: ``config.json``, ``checkpoint.zip``, ``progress.csv`` and TensorBoard events."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stable_baselines3.common.logger import KVWriter, Logger, make_output_format

from rlxf.training.atomic import atomic_write, sync_folder
from rlxf.training.checkpoints import CheckpointFolder
from rlxf.training.continued_log import ContinuedCSV, ContinuedTensorBoard, ProgressCSV
from rlxf.training.plain_json import dump_json, load_json

CONFIG = "config.json"
CHECKPOINT = "checkpoint.zip"
CHECKPOINTS = "checkpoints"
BEST = "best.zip"
NORMALIZER = "normalizer.zip"
BEST_NORMALIZER = "best-normalizer.zip"
LOG = "progress.csv"
SB3 = "A file of Stable-Baselines3 is read by rlxf.import_sb3, and by rlxf collect --sb3.files"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Args:
        path: the folder.
        config: what the run was started with, a JSON object.
    """

    path: Path
    config: dict[str, Any]

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: dict[str, Any]) -> Self:
        """Make a new folder, with its parents, and write ``config.json`` into it.

        Raises:
            FileExistsError: if ``path`` exists; nothing in it is touched.
            TypeError, ValueError: if ``config`` is no JSON; nothing is made.
            OSError: if the folder cannot be made or written; nothing is left of it.
        """
        path = Path(path)
        text = dump_json(config, indent=2)
        try:
            path.mkdir(parents=True)
        except FileExistsError as error:
            raise FileExistsError(f"{path} exists; choose another folder or move it away") from error
        except OSError as error:
            raise type(error)(f"{path} cannot be made ({error.strerror}); choose another folder") from error
        try:
            atomic_write(path / CONFIG, lambda handle: handle.write(text))
            sync_folder(path.parent)
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(path, config)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open the folder of a run that has saved a checkpoint.

        Raises:
            FileNotFoundError: if the folder, its ``config.json`` or its ``checkpoint.zip`` is missing.
            NotADirectoryError: if ``path`` is a file.
            ValueError: if ``config.json`` holds no JSON object.
        """
        run = cls.reopen(path)
        if not run.checkpoint.is_file():
            raise FileNotFoundError(f"the run {run.path} ended before it saved {CHECKPOINT}; train it again")
        return run

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> Self:
        """Open the folder of a run that shall go on; it may have been cut off at any moment.

        Raises:
            FileNotFoundError: if the folder or its ``config.json`` is missing.
            NotADirectoryError: if ``path`` is a file.
            ValueError: if ``config.json`` holds no JSON object.
        """
        _check_folder(Path(path))
        return cls(Path(path), _read_config(Path(path) / CONFIG))

    @property
    def checkpoints(self) -> CheckpointFolder:
        """Where those are that were saved while it went on, to resume it."""
        return CheckpointFolder(self.path / CHECKPOINTS)

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint of the run is, or will be."""
        return self.path / CHECKPOINT

    @property
    def best(self) -> Path:
        """Where the checkpoint is that was the best in the evaluations during training, if there is one."""
        return self.path / BEST

    @property
    def normalizer(self) -> Path:
        """Where the statistics of normalised observations and rewards are, or will be."""
        return self.path / NORMALIZER

    @property
    def best_normalizer(self) -> Path:
        """Where the statistics are with which `best` was evaluated during training."""
        return self.path / BEST_NORMALIZER

    def discard(self) -> None:
        """Remove the folder with all that is in it: the run came to nothing."""
        shutil.rmtree(self.path)

    def make_logger(self, formats: Sequence[str] = ("tensorboard", "csv")) -> Logger:
        """A logger of Stable-Baselines3 that writes into this folder.

        Args:
            formats: names of SB3's output formats. The default writes TensorBoard events and
                ``progress.csv``, the latter with columns in a fixed order (`ProgressCSV`); add "stdout" for
                tables on the screen.

        Raises:
            FileExistsError: if the run has a ``progress.csv``, which a second logger would empty.
        """
        if "csv" in formats and (self.path / LOG).exists():
            raise FileExistsError(f"{self.path / LOG} exists and would be emptied; use a new run folder")
        return Logger(str(self.path), [self._output(name) for name in formats])

    def _output(self, name: str) -> KVWriter:
        return ProgressCSV(self.path / LOG) if name == "csv" else make_output_format(name, str(self.path))

    def continue_logger(self, step: int) -> Logger:
        """A logger that goes on with what `make_logger` began; points behind ``step`` are taken back."""
        continued = [ContinuedTensorBoard(self.path, step), ContinuedCSV(self.path / LOG, step)]
        return Logger(str(self.path), continued)


def _check_folder(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"there is no run folder {path}; check the path")
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; give the folder of a run. {SB3}")
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"{path} is no run folder: it has no {CONFIG}; give the folder of a run")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = load_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; restore it") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not a JSON object; restore it")
    return config
