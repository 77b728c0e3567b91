"""Commands under torchrun: the job, its processes, and what each of them prints."""

import os
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

from stable_baselines3.common.logger import Logger

from rlxf.cli.output import print_out
from rlxf.training import RunFolder
from rlxf.training.archive import Archive
from rlxf.training.distributed import init_process_group, process_group
from rlxf.training.strict_json import load_json_file, write_json_file
from rlxf.utils.signals import set_handler

RUN_ID_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Environment variable in which torchrun stores the job id."""
MARKER_FILE = "torchrun.json"
"""Name of the marker file in the folder of a run.

It is a separate file, so that ``config.json`` is the same without torchrun.
"""
UNKNOWN = ""
"""Agent on systems that do not report the start time of a process; it matches no marker."""


@dataclass(frozen=True)
class TorchrunJob:
    """Job of torchrun, which stays the same when torchrun restarts its worker processes.

    The job id is not unique, because it is set with ``--rdzv-id``. Jobs are therefore compared by their
    agents, too: the processes of torchrun itself, one per machine. Agents may join and leave, but two
    successive starts of a job have at least one agent in common.

    Args:
        job_id: job id of torchrun.
        agents: host, process id and start time of each agent.
    """

    job_id: str
    agents: frozenset[str]

    @classmethod
    def current(cls) -> Self | None:
        """Return the job that started the processes of this group; None without torchrun."""
        job_id = os.environ.get(RUN_ID_VARIABLE)
        if job_id is None:
            return None
        archives = process_group().gather_archives(Archive({"agent": _agent()}, {}))
        return cls(job_id, frozenset(archive.documents["agent"] for archive in archives) - {UNKNOWN})

    def started(self, run: Path) -> bool:
        """Return whether this job wrote the marker file in the folder of a run."""
        file = run / MARKER_FILE
        marker = load_json_file(file) if file.is_file() else None
        if not isinstance(marker, dict) or not isinstance(marker.get("agents"), list):
            return False
        return marker.get("job_id") == self.job_id and any(agent in marker["agents"] for agent in self.agents)

    def mark(self, run: Path) -> None:
        """Write the marker file of this job into the folder of a run.

        Raises:
            OSError: if the file cannot be written.
        """
        marker = {"job_id": self.job_id, "agents": sorted(self.agents)}
        write_json_file(run / MARKER_FILE, marker)


def _agent() -> str:
    """Return host, process id and start time of the torchrun process that started this one.

    The start time is in clock ticks since boot (proc(5), starttime). It is needed because process ids are
    reused.
    """
    stat = Path(f"/proc/{os.getppid()}/stat")
    if not stat.is_file():
        return UNKNOWN
    fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()  # after the name
    return f"{socket.gethostname()} {os.getppid()} {fields[19]}"


def init_distributed() -> None:
    """Initialize the process group under torchrun, and silence output and UserWarnings of all ranks but 0.

    Errors are still printed by all processes.

    Raises:
        ValueError: if a machine has GPUs, but fewer GPUs than processes.
        ConnectionError: if other processes do not connect.
    """
    if not init_process_group().is_main:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open until the process ends
        warnings.simplefilter("ignore", UserWarning)


def create_run(path: Path, config: dict[str, Any]) -> RunFolder:
    """Create the folder of a run after all processes are ready, with the marker file of the job.

    Raises:
        FileExistsError, OSError: as in `RunFolder.create`, in the process of rank 0.
    """
    job = TorchrunJob.current()
    process_group().barrier()
    if process_group().is_main:
        RunFolder.create(path, config, fill=lambda folder: None if job is None else job.mark(folder))
    process_group().barrier()
    return RunFolder(path, config)


def rank_zero_logger(make: Callable[[], Logger]) -> Logger:
    """Return ``make()`` in the process of rank 0, and a logger without outputs in the others."""
    return make() if process_group().is_main else Logger(folder=None, output_formats=[])


def restarted_run(path: Path) -> RunFolder | None:
    """Return the run at ``path`` if torchrun restarted its processes and it has checkpoints; else None.

    If the run belongs to the same job and has no periodic checkpoint, it starts from the beginning: its
    folder is removed, or renamed if it contains checkpoint.zip. Folders of other jobs are not changed.
    """
    job = TorchrunJob.current()
    if job is None:
        return None
    is_main = process_group().is_main
    run = RunFolder.reopen(path) if is_main and job.started(path) else None
    if process_group().all_reduce_max(int(run is not None and bool(run.resume_checkpoints.files()))):
        if is_main:
            job.mark(path)  # machines may have joined the job
        return RunFolder.reopen(path)
    if run is not None:
        _clear(run)
    process_group().barrier()
    return None


def _clear(run: RunFolder) -> None:
    """Remove the folder of a run, or rename it if it contains checkpoint.zip."""
    if not run.final_checkpoint.exists():
        shutil.rmtree(run.path)
        return
    names = (run.path.with_name(f"{run.path.name}-before-{number}") for number in count(1))
    backup = run.path.rename(next(name for name in names if not name.exists()))
    print_out(
        f"{run.path} has no periodic checkpoint to resume from: it is renamed to {backup}, and the run "
        f"starts again"
    )


def ignore_signals() -> None:
    """Ignore signals if there are several processes.

    When the first process exits, torchrun sends signals to the others while they still save.
    """
    if process_group().world_size > 1:
        set_handler(signal.SIG_IGN)
