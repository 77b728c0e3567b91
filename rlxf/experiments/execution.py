"""Execution of the runs of an experiment: one process for each run, and a lock for each folder."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlxf.experiments.jobs import RESUMED, ExperimentError, Job, Outcome, is_complete
from rlxf.utils.files import make_folder, try_lock
from rlxf.utils.framed_errors import last_message
from rlxf.utils.run_files import COMPLETED, CONFIG

FOLDER_LOCK = ".lock"
"""Name of the lock file in the folder of an experiment."""
LOG_TAIL = 16_384
"""Bytes at the end of a log file in which the message of a failure is searched."""
MESSAGE_CHARACTERS = 500
POLL_SECONDS = 1.0
"""Time between two calls of the function that decides whether a process is stopped early."""
LOCK_SECONDS = 0.2
"""Time between two attempts to get a lock, and between two signals to runs that are stopped."""


_running: set[subprocess.Popen] = set()
"""Processes of this process that train now."""
_stopping = threading.Event()
"""Set while `stop_all` waits; runs that wait for a lock are then canceled."""


def run_job(job: Job, should_stop: Callable[[], bool] | None = None) -> Outcome:
    """Train a run to its end in a process of its own, and return the outcome.

    A run that is complete is not trained again. The process inherits the lock of the run, so that no
    other process trains in this folder before it ends, even if the caller was killed.

    Args:
        job: the run.
        should_stop: function that is called every second; the process receives SIGTERM once it returns True.
            None trains to the end.

    Raises:
        CancelledError: if `stop_all` is called while another process trains in this folder.
    """
    make_folder(Path(job.folder).parent, exist_ok=True)
    with locked(job.sibling("lock")) as lock:
        new = Outcome([job.command, *job.arguments], options=job.options)
        before = Outcome.read(job) or new
        if is_complete(job):
            if before.returncode == 0:
                return before
            return _recorded(job, before, 0, "", _orphan_seconds(job, before))
        if not job.command.startswith(RESUMED):
            shutil.rmtree(job.folder, ignore_errors=True)
        if not (Path(job.folder) / CONFIG).is_file():
            before = replace(new, attempts=before.attempts)
        started = replace(before, returncode=None, attempts=before.attempts + 1)
        started.write(job)  # so that the options are known, even if this process is killed
        log = job.sibling("log")
        start = time.monotonic()
        written = log.stat().st_size if log.is_file() else 0
        code = _train(job, lock, should_stop)
        message = "" if code == 0 else failure_message(log, written)
        return _recorded(job, started, code, message, time.monotonic() - start)


def _recorded(job: Job, started: Outcome, code: int, message: str, seconds: float) -> Outcome:
    outcome = replace(started, returncode=code, message=message, seconds=started.seconds + seconds)
    outcome.write(job)
    return outcome


def _orphan_seconds(job: Job, before: Outcome) -> float:
    """Return the time of the last attempt of a complete run if its end is not recorded, else 0."""
    start = job.sibling("json")
    end = Path(job.folder) / COMPLETED
    if before.returncode is not None or not start.is_file():
        return 0.0
    return max(0.0, end.stat().st_mtime - start.stat().st_mtime)


def _train(job: Job, lock: int, should_stop: Callable[[], bool] | None) -> int:
    """Run the process of a run, with its output in the log file, and return its exit status.

    With ``-P``, Python does not search the working directory, which may be that of a downloaded experiment.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(job.threads), "COLUMNS": "160"}
    with open(_open_here(job.sibling("log"), os.O_WRONLY | os.O_APPEND), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlxf", *job.words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=() if os.name == "nt" else (lock,),
        )
    _running.add(process)
    try:
        return process.wait() if should_stop is None else _wait(process, should_stop)
    finally:
        _running.discard(process)


def _wait(process: subprocess.Popen, should_stop: Callable[[], bool]) -> int:
    """Wait for the end of a process, and return its exit status; send SIGTERM if it should stop."""
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_SECONDS)
            if should_stop():
                process.terminate()
                return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


@contextmanager
def locked(path: Path, blocking: bool = True) -> Iterator[int]:
    """Hold an exclusive lock on a file, and yield its descriptor.

    Raises:
        BlockingIOError: if ``blocking`` is False, and another process holds the lock.
        CancelledError: if `stop_all` is called while this function waits.
        ExperimentError: if the file is a symbolic link.
    """
    descriptor = _open_here(path, os.O_RDWR)
    try:
        while not try_lock(descriptor):
            if not blocking:
                raise BlockingIOError(f"another process holds {path}")
            if _stopping.wait(LOCK_SECONDS):
                raise CancelledError(f"stopped before {path} was free")
        yield descriptor
    finally:
        os.close(descriptor)


def _open_here(path: Path, flags: int) -> int:
    """Open a file, which is created if it does not exist, and return its descriptor.

    Raises:
        ExperimentError: if it is a symbolic link, which would redirect what is written.
    """
    no_follow = getattr(os, "O_NOFOLLOW", 0)  # does not exist on Windows
    try:
        return os.open(path, flags | os.O_CREAT | no_follow, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ExperimentError(
            f"{path} is a symbolic link, and commands do not write to the targets of links: remove the link"
        ) from None


def check_replaceable(folder: Path, names: Collection[str], markers: Collection[Path]) -> None:
    """Raise ValueError if the results of an experiment or a sweep would replace files of the user.

    Args:
        folder: folder of the experiment; it need not exist.
        names: names of the result files.
        markers: files of which one is in the folder if the command has made it.
    """
    found = [name for name in names if (folder / name).exists()]
    if found and not any(marker.exists() for marker in markers):
        raise ValueError(
            f"{folder} has {', '.join(found)}, which would be replaced, but was not made by this command: "
            f"choose another folder with --output"
        )


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Keep other processes out of the folder of an experiment, which is created if it does not exist.

    Raises:
        ExperimentError: if another process works on it.
    """
    make_folder(folder, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / FOLDER_LOCK, blocking=False))
        except BlockingIOError:
            raise ExperimentError(
                f"another process works on the experiment in {folder}; wait for it, or choose another folder "
                f"with --output"
            ) from None
        yield


def failure_message(log: Path, start: int = 0) -> str:
    """Return the message at the end of a log file: its last line, or that in a frame; "" if there is none.

    Args:
        log: the file.
        start: number of bytes at its beginning that do not count.
    """
    with open(log, "rb") as file:
        file.seek(max(start, log.stat().st_size - LOG_TAIL))
        text = file.read().decode(errors="replace")
    return last_message(text)[:MESSAGE_CHARACTERS]


def run_jobs(
    jobs: Sequence[Job], executor: Executor, on_outcome: Callable[[Job, Outcome | BaseException], object]
) -> None:
    """Train runs in parallel, and report the outcome of each.

    A failure does not end the others. When this process is interrupted, runs that have not started are
    canceled, and those of a local executor save their progress.

    Args:
        jobs: the runs, in the order in which they start.
        executor: executes `run_job`: `local_executor`, or that of a cluster.
        on_outcome: function of a run and its outcome, or of the exception that ended its worker.
    """
    futures: dict[Future[Outcome], Job] = {executor.submit(run_job, job): job for job in jobs}
    try:
        for future in as_completed(futures):
            error = future.exception()
            on_outcome(futures[future], future.result() if error is None else error)
    except BaseException:
        stop_all(futures)
        raise


def stop_all(futures: Collection[Future[Any]]) -> None:
    """Cancel runs that have not started, let the others save their progress, and wait until all have ended.

    Runs on a cluster continue to their ends: their calls are canceled here, but not their processes.

    Args:
        futures: calls of `run_job`, or of functions that call it.
    """
    _stopping.set()
    try:
        started = [future for future in futures if not future.cancel()]
        while wait(started, timeout=LOCK_SECONDS).not_done:
            _stop_running()  # again for a process that was being started
    finally:
        _stopping.clear()


def _stop_running() -> None:
    for process in list(_running):
        process.terminate()
    for process in list(_running):
        process.wait()


def local_executor(processes: int) -> Executor:
    """Return an executor of ``processes`` runs at a time on this machine; its threads wait for processes."""
    return ThreadPoolExecutor(processes)


@contextmanager
def cluster_executor(address: str) -> Iterator[Executor]:
    """Connect to a scheduler of dask.distributed, and yield an executor of its workers.

    Each thread of a worker trains one run at a time. Workers need the same version of rlxf, and the folder of
    the experiment at the same path. The runs of a worker that dies are given to others, which resume them.

    Args:
        address: address of the scheduler, e.g. "tcp://10.0.0.1:8786".

    Raises:
        ImportError: if dask.distributed is not installed.
        ConnectionError: if there is no scheduler at this address.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError(
            f"--scheduler needs dask.distributed, which is not installed: pip install 'rlxf[experiment]' "
            f"({error})"
        ) from error
    try:
        client: Any = Client(address, timeout=10)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConnectionError(
            f"there is no dask scheduler at {address}: start one with dask scheduler, and workers with dask "
            f"worker ({error})"
        ) from error
    with client:
        yield client.get_executor(retries=3, pure=False)
