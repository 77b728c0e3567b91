"""One run of several processes: that of rank 0 writes and speaks, the others learn and are silent."""

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
"""What a start of the processes may leave of a run to the next one."""


def join_others() -> None:
    """Meet the processes that torchrun has started, if it has; all but one fall silent, but for errors.

    Raises:
        ValueError: if there are more of them than GPUs.
        ConnectionError: if the others do not come.
    """
    if not join().writes:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
        warnings.simplefilter("ignore", UserWarning)


def new_run(path: Path, config: dict[str, Any]) -> RunFolder:
    """The folder of a run, made once all processes are ready to begin; it knows the job that began it.

    Raises:
        FileExistsError, OSError: as `RunFolder.create`, in the process that writes.
    """
    job = Job.at_hand()
    here().wait()
    if here().writes:
        RunFolder.create(path, config, fill=lambda folder: None if job is None else job.mark(folder))
    here().wait()
    return RunFolder(path, config)


def log_of(make: Callable[[], Logger]) -> Logger:
    """What ``make`` gives in the process that writes; elsewhere a log that goes nowhere."""
    return make() if here().writes else Logger(folder=None, output_formats=[])


def started_anew(path: Path) -> RunFolder | None:
    """The run at ``path`` if torchrun has started its processes anew, and there is where to go on from.

    Without a checkpoint yet the same job begins it anew: the folder is removed, or set aside if it has
    weights. Runs of other jobs are left as they are.
    """
    job = Job.at_hand()
    if job is None:
        return None
    left = here().largest(_left(job, path) if here().writes else NOTHING)
    if left == CHECKPOINTS:
        return _taken_up(job, path)
    if left == FOLDER and here().writes:
        _clear(path)
    here().wait()
    return None


def _clear(path: Path) -> None:
    """Make room for a run; what was learned in the one before stays."""
    if not RunFolder.reopen(path).checkpoint.exists():
        shutil.rmtree(path)
        return
    aside = next(name for name in _names_aside(path) if not name.exists())
    path.rename(aside)
    show(f"{path} has no checkpoint to go on from: it is now {aside}, and the run begins anew")


def _names_aside(path: Path) -> Iterator[Path]:
    return (path.with_name(f"{path.name}-before-{number}") for number in count(1))


def _left(job: Job, path: Path) -> int:
    """What an earlier start of the same job has left."""
    if not job.began(path):
        return NOTHING
    return CHECKPOINTS if RunFolder.reopen(path).checkpoints.files() else FOLDER


def _taken_up(job: Job, path: Path) -> RunFolder:
    if here().writes:
        job.mark(path)  # machines may have come
    return RunFolder.reopen(path)


def deafen() -> None:
    """Leave undisturbed if there are several: once one has left, torchrun sends signals to all others."""
    if here().count > 1:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
