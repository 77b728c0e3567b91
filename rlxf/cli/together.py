"""One run of several processes: that of rank 0 writes and speaks, the others learn and are silent."""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import Logger

from rlxf.training import RunFolder
from rlxf.training.joining import here, join
from rlxf.training.ranks import RESTARTS
from rlxf.training.stopping import SIGNALS


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
    """The folder of a run, made once all processes are ready to begin.

    Raises:
        FileExistsError, OSError: as `RunFolder.create`, in the process that writes.
    """
    make = RunFolder.create if here().writes else RunFolder
    here().wait()
    return here().first_then_all(lambda: make(path, config))


def log_of(make: Callable[[], Logger]) -> Logger:
    """What ``make`` gives in the process that writes; elsewhere a log that goes nowhere."""
    return make() if here().writes else Logger(folder=None, output_formats=[])


def started_anew(path: Path) -> RunFolder | None:
    """The run at ``path`` if torchrun has started its processes anew, and there is where to go on from."""
    if os.environ.get(RESTARTS, "0") == "0" or not path.exists():
        return None
    run = RunFolder.reopen(path)
    return run if run.checkpoints.files() else None


def deafen() -> None:
    """Leave undisturbed if there are several: once one has left, torchrun sends signals to all others."""
    if here().count > 1:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
