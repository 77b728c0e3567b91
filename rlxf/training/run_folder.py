"""Folder of a run: configuration, logs, checkpoints, and the marker of a completed run."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stable_baselines3.common.logger import Logger

from rlxf.training.checkpoints import CheckpointFolder
from rlxf.training.completion import RESULTS, Completion
from rlxf.training.file_contents import describe_file, missing_path_advice, no_run_folder_message
from rlxf.training.resumed_logger import LogFiles, LogPosition, ProgressCSV
from rlxf.training.strict_json import dump_json, load_json_object, write_json_file
from rlxf.training.tensorboard import described_output, resumed_output
from rlxf.utils.files import (
    check_no_links,
    create_folder,
    file_sha256,
    not_writable_by_others,
    sync_folder,
    write_file,
)
from rlxf.utils.run_files import (
    BASELINE,
    BEST,
    BEST_NORMALIZER,
    BEST_VALIDATION,
    CHECKPOINT,
    CHECKPOINT_FOLDER,
    COMPLETED,
    CONFIG,
    EVALUATION,
    NORMALIZER,
    PROGRAM,
    PROGRESS,
)

SB3_ADVICE = "For a file of Stable-Baselines3, use rlxf.import_sb3, or rlxf collect --sb3.files"


@dataclass(frozen=True)
class RunFolder:
    """Folder of one run.

    Args:
        path: the folder.
        config: configuration of the run, a JSON object.
    """

    path: Path
    config: dict[str, Any]

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        config: dict[str, Any],
        fill: Callable[[Path], None] = lambda folder: None,
    ) -> Self:
        """Create a new run folder and its parents, and write ``config.json`` into it.

        The folder appears at ``path`` atomically, with all its initial files, even if the process is killed.

        Args:
            path: the folder.
            config: configuration of the run, a JSON object.
            fill: function that writes further files into the folder before it appears.

        Raises:
            FileExistsError: if ``path`` exists; its content is unchanged.
            TypeError, ValueError: if ``config`` is not JSON; nothing is created.
            OSError: if the folder cannot be created or written; it is then removed.
        """
        path = Path(path)
        text = dump_json(config, indent=2)

        def write(folder: Path) -> None:
            write_file(folder / CONFIG, text)
            fill(folder)

        create_folder(path, write)
        return cls(path, config)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open the folder of a run with a final checkpoint.

        Raises:
            FileNotFoundError: if the folder, its ``config.json`` or its ``checkpoint.zip`` is missing.
            NotADirectoryError: if ``path`` is a file.
            ValueError: if ``config.json`` is not a JSON object, or if the folder contains a symbolic link.
        """
        run = cls.reopen(path)
        if not run.final_checkpoint.is_file():
            raise FileNotFoundError(f"the run {run.path} has no {CHECKPOINT}{run._reason_without_checkpoint}")
        return run

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> Self:
        """Open the folder of a run to resume it; the run may have been killed at any moment.

        Raises:
            FileNotFoundError: if the folder or its ``config.json`` is missing.
            NotADirectoryError: if ``path`` is a file.
            ValueError: if ``config.json`` is not a JSON object, or if the folder contains a symbolic link.
        """
        _check_folder(Path(path))
        return cls(Path(path), load_json_object(Path(path) / CONFIG, "restore it"))

    @property
    def _reason_without_checkpoint(self) -> str:
        """Reason for a missing final checkpoint and the remedy, for the end of a message."""
        if self.config.get(PROGRAM) == BASELINE:
            return (
                f": it was made by {BASELINE}, which saves no agent. Only rlxf plot, rlxf compare and rlxf "
                "experiment read it; train an agent with rlxf train"
            )
        if self.resume_checkpoints.files():
            return f", as it is still training or was killed: continue it with rlxf resume {self.path}"
        return ", as it ended before it saved one; train it again"

    @property
    def resume_checkpoints(self) -> CheckpointFolder:
        """Folder of the periodic checkpoints, from which the run can be resumed."""
        return CheckpointFolder(self.path / CHECKPOINT_FOLDER)

    @property
    def final_checkpoint(self) -> Path:
        """Path of the final checkpoint; it may not exist yet."""
        return self.path / CHECKPOINT

    @property
    def best(self) -> Path:
        """Path of the checkpoint with the best evaluation during training; it may not exist."""
        return self.path / BEST

    @property
    def best_validation(self) -> Path:
        """Path of the checkpoint with the lowest validation loss during training; it may not exist."""
        return self.path / BEST_VALIDATION

    @property
    def normalizer(self) -> Path:
        """Path of the statistics of normalized observations and rewards; it may not exist yet."""
        return self.path / NORMALIZER

    @property
    def best_normalizer(self) -> Path:
        """Path of the statistics with which `best` was evaluated during training."""
        return self.path / BEST_NORMALIZER

    def discard(self) -> None:
        """Remove the folder with all of its content."""
        shutil.rmtree(self.path)

    @not_writable_by_others()
    def make_logger(self) -> Logger:
        """Return a logger of Stable-Baselines3 that writes TensorBoard events and ``progress.csv``.

        Raises:
            FileExistsError: if the run has a ``progress.csv``, which a second logger would overwrite.
        """
        log = self.path / PROGRESS
        if log.exists():
            raise FileExistsError(f"{log} exists and would be overwritten; use a new run folder")
        events = described_output(self.path)
        return Logger(str(self.path), [events, ProgressCSV(log)])

    @property
    def log_files(self) -> LogFiles:
        """Log files of the run; their state is part of each checkpoint."""
        return LogFiles(self.path)

    @not_writable_by_others()
    def continue_logger(self, position: LogPosition, step: int) -> Logger:
        """Open a logger that continues the logs of `make_logger`.

        Args:
            position: log position at which to continue; later entries are removed.
            step: number of steps at this position.
        """
        events = resumed_output(self.path, position, step)
        return Logger(str(self.path), [events, ProgressCSV(self.path / PROGRESS, position.rows)])

    def reconfigured(self, **changes: Any) -> Self:
        """Replace values in ``config.json`` atomically, and remove the completion marker and the evaluation.

        The evaluation is that of a checkpoint that the training will replace.

        Args:
            **changes: new values by key.

        Returns:
            This run with the new configuration.

        Raises:
            OSError: if a file cannot be written.
        """
        config = self.config | changes
        write_json_file(self.path / CONFIG, config)
        for name in (EVALUATION, COMPLETED):  # a run with this total and the marker is reconfigured again
            (self.path / name).unlink(missing_ok=True)
        sync_folder(self.path)
        return type(self)(self.path, config)

    @property
    def has_marker(self) -> bool:
        """True if the run has a completion marker, even if a result file that it lists is missing."""
        return (self.path / COMPLETED).exists()

    @property
    def completion(self) -> Completion | None:
        """Completion marker of the run; None while the run is incomplete."""
        return Completion.read(self.path)

    def complete(self, steps: int, ended_early: bool = False) -> None:
        """Sync the logs to the disk, then write the completion marker as the last file of the run.

        Args:
            steps: steps or updates of the run.
            ended_early: see `Completion`.

        Raises:
            OSError: if a file cannot be written or synced.
        """
        self.log_files.sync()
        results = [self.path / name for name in RESULTS]
        digests = {file.name: file_sha256(file) for file in results if file.is_file()}
        marker = {"steps": steps, "ended_early": ended_early, "sha256": digests}
        write_json_file(self.path / COMPLETED, marker)


def _check_folder(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"there is no run folder {path}{missing_path_advice(path)}")
    if not path.is_dir():
        raise NotADirectoryError(_file_instead(path))
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(no_run_folder_message(path))
    check_no_links(path)


def _file_instead(path: Path) -> str:
    """Return the error message for a file instead of a run folder: its run folder, or its content."""
    if (path.parent / CONFIG).is_file():
        return f"{path} is a file; give the folder of its run, {path.parent}"
    return f"{path} is a file; give the folder of a run. About this file: {describe_file(path)}. {SB3_ADVICE}"
