"""Runs of several processes, of which only rank 0 prints and writes files."""

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import Logger

from rlxf.cli.job import Job
from rlxf.cli.screen import show
from rlxf.training import RunFolder
from rlxf.training.joining import here, join
from rlxf.training.stopping import SIGNALS

NOTHING, FOLDER, CHECKPOINTS = range(3)
"""State of a run after a previous start of the same job: no folder, a folder, or checkpoints."""


def join_others() -> None:
    """Initialize the process group under torchrun, and silence output and warnings of all but rank 0.

    Errors are still printed by all processes.

    Raises:
        ValueError: if there are more processes than GPUs.
        ConnectionError: if other processes do not connect.
    """
    if not join().writes:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # stays open until the process ends
        warnings.simplefilter("ignore", UserWarning)


def new_run(path: Path, config: dict[str, Any]) -> RunFolder:
    """Create the folder of a run after all processes are ready, with the marker file of the job.

    Raises:
        FileExistsError, OSError: as in `RunFolder.create`, in the writing process.
    """
    job = Job.at_hand()
    here().wait()
    if here().writes:
        RunFolder.create(path, config, fill=lambda folder: None if job is None else job.mark(folder))
    here().wait()
    return RunFolder(path, config)


def log_of(make: Callable[[], Logger]) -> Logger:
    """Return ``make()`` in the writing process, and a logger without outputs in the others."""
    return make() if here().writes else Logger(folder=None, output_formats=[])


def started_anew(path: Path) -> RunFolder | None:
    """Return the run at ``path`` if torchrun restarted its processes and it has checkpoints; else None.

    If the run belongs to the same job and has no checkpoint, it starts from the beginning: its folder is
    removed, or renamed if it contains weights. Folders of other jobs are not changed.
    """
    job = Job.at_hand()
    if job is None:
        return None
    state = here().largest(_run_state(job, path) if here().writes else NOTHING)
    if state == CHECKPOINTS:
        return _reopen(job, path)
    if state == FOLDER and here().writes:
        _clear(path)
    here().wait()
    return None


def _clear(path: Path) -> None:
    """Remove the folder of a run, or rename it if it contains weights."""
    if not RunFolder.reopen(path).checkpoint.exists():
        shutil.rmtree(path)
        return
    backup = next(name for name in _backup_names(path) if not name.exists())
    path.rename(backup)
    show(f"{path} has no checkpoint to resume from: it is renamed to {backup}, and the run starts again")


def _backup_names(path: Path) -> Iterator[Path]:
    return (path.with_name(f"{path.name}-before-{number}") for number in count(1))


def _run_state(job: Job, path: Path) -> int:
    """Return the state in which a previous start of the same job left the run."""
    if not job.began(path):
        return NOTHING
    return CHECKPOINTS if RunFolder.reopen(path).checkpoints.files() else FOLDER


def _reopen(job: Job, path: Path) -> RunFolder:
    if here().writes:
        job.mark(path)  # machines may have joined the job
    return RunFolder.reopen(path)


def deafen() -> None:
    """Ignore signals if there are several processes.

    When the first process exits, torchrun sends signals to the others while they still save.
    """
    if here().count > 1:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
