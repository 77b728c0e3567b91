"""Execution of the runs of an experiment: one process for each run, and a lock for each folder."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any, Self

from rlxf.training.file_contents import CONFIG
from rlxf.training.json_rules import NOTHING, TEXT, TEXTS, check_fields, number, whole
from rlxf.training.run_folder import COMPLETED, Completion
from rlxf.training.serialization import dump_json, load_json, load_json_file
from rlxf.utils.files import atomic_write, make_folder

RESUMED = "train "
"""Start of the commands whose runs have checkpoints, so that they can be resumed."""
FOLDER_LOCK = ".lock"
"""Name of the lock file in the folder of an experiment."""
LOG_TAIL = 16_384
"""Bytes at the end of a log file in which the message of a failure is searched."""
MESSAGE_CHARACTERS = 500
POLL_SECONDS = 1.0
"""Time between two calls of the function that decides whether a process is stopped early."""
LOCK_SECONDS = 0.2
"""Time between two attempts to get a lock, and between two signals to runs that are stopped."""


class ExperimentError(OSError, ValueError):
    """Error in the folder of an experiment, such as a damaged file.

    It is an OSError for commands, which report these in one line, and a ValueError for a sweep, where a trial
    with such a run fails.
    """


@dataclass(frozen=True)
class Job:
    """Run of an experiment that is trained in a process of its own.

    Args:
        folder: folder of the run. Next to it are FOLDER.json, FOLDER.log and FOLDER.lock.
        command: words of the command that trains the agent.
        arguments: its options, without the folder.
        trusted: resume the run with trust in its environment, which the experiment file names.
        threads: threads of the process.
        options: all options of the command as JSON, those of files that the arguments name included.
    """

    folder: str
    command: str
    arguments: tuple[str, ...]
    trusted: bool = False
    threads: int = 1
    options: str = "{}"

    @property
    def words(self) -> list[str]:
        """Arguments of ``rlxf`` that continue the run, or start it."""
        folder = Path(self.folder)
        if self.command.startswith(RESUMED) and (folder / CONFIG).is_file():
            return ["resume", self.folder, "--no-progress-bar", *(["--trust"] if self.trusted else [])]
        bar = ["--no-progress-bar"] if self.command.startswith(RESUMED) else []
        return [*self.command.split(), *self.arguments, "--run", self.folder, *bar]

    def sibling(self, suffix: str) -> Path:
        """Return the path of a file next to the folder of the run."""
        return Path(f"{self.folder}.{suffix}")


OUTCOME_RULES = {
    "command": TEXTS,
    "returncode": whole() | NOTHING,
    "message": TEXT,
    "seconds": number(0),
    "attempts": whole(0),
    "options": TEXT,
}
"""Rules of the fields of `Outcome` in a file."""


@dataclass(frozen=True)
class Outcome:
    """State of a run since the start of its last attempt.

    Args:
        command: words of the command and its options.
        returncode: exit status of the process; 0 after success, negative after a signal. None while it
            trains, and after the program that started it was killed.
        message: last line of its output after a failure.
        seconds: wall-clock time of the attempts whose end was recorded, from the last one that began a new
            training.
        attempts: number of processes that were started.
        options: options of the command, see `Job`; an empty object in files of earlier versions.
    """

    command: list[str]
    returncode: int | None = None
    message: str = ""
    seconds: float = 0.0
    attempts: int = 0
    options: str = "{}"

    @property
    def failure(self) -> str:
        """Reason why the last attempt has not finished the run; "" if it has."""
        if self.returncode is None:
            return "it has not ended, or the program that started it was killed"
        if self.returncode < 0:
            return _ended_by(-self.returncode)
        return "" if self.returncode == 0 else self.message or f"exit status {self.returncode}"

    @classmethod
    def read(cls, job: Job) -> Self | None:
        """Read the state of the last attempt; None if there was none.

        Raises:
            ExperimentError: if the file is damaged.
        """
        file = job.sibling("json")
        if not file.is_file():
            return None
        try:
            document = {"options": "{}", **load_json_file(file)}
            check_fields(document, OUTCOME_RULES, file.name)
            if not isinstance(load_json(document["options"].encode()), dict):
                raise TypeError("options must be an object")
            return cls(**document)
        except (ValueError, TypeError) as error:
            raise ExperimentError(f"{file} is damaged: remove it and the folder {job.folder}") from error

    def write(self, job: Job) -> None:
        """Replace the file with the outcome of a run."""
        content = dump_json(self.__dict__, indent=2)
        atomic_write(job.sibling("json"), lambda file: file.write(content))


def _ended_by(signal: int) -> str:
    """Return the reason of the failure of a process that a signal has ended."""
    name = Signals(signal).name if signal in list(Signals) else f"signal {signal}"
    memory = ", e.g. because the memory was exhausted" if name == "SIGKILL" else ""
    return f"the training was ended by {name}{memory}"


def is_complete(job: Job) -> bool:
    """Return whether a run has finished, with its evaluation."""
    return Completion.read_marker(Path(job.folder)) is not None


_running: set[subprocess.Popen] = set()
"""Processes of this process that train now."""
_stopping = threading.Event()
"""Set while `stop_all` waits; runs that wait for a lock are then cancelled."""


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
        message = "" if code == 0 else last_line(log, written)
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
    with open(job.sibling("log"), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlxf", *job.words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(lock,),
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
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        while not _try_lock(descriptor):
            if not blocking:
                raise BlockingIOError(f"another process holds {path}")
            if _stopping.wait(LOCK_SECONDS):
                raise CancelledError(f"stopped before {path} was free")
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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


def last_line(log: Path, start: int = 0) -> str:
    """Return the last line of a log file without the name of the program; "" if there is none.

    Args:
        log: the file.
        start: number of bytes at its beginning that do not count.
    """
    with open(log, "rb") as file:
        file.seek(max(start, log.stat().st_size - LOG_TAIL))
        lines = file.read().decode(errors="replace").split("\n")
    written = [line.strip() for line in lines if line.strip()]
    return written[-1].removeprefix("rlxf: ")[:MESSAGE_CHARACTERS] if written else ""


def run_jobs(
    jobs: Sequence[Job], executor: Executor, on_outcome: Callable[[Job, Outcome | BaseException], object]
) -> None:
    """Train runs in parallel, and report the outcome of each.

    A failure does not end the others. When this process is interrupted, runs that have not started are
    cancelled, and those of a local executor save their progress.

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

    Runs on a cluster continue to their ends: their calls are cancelled here, but not their processes.

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
