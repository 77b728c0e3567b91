"""Handle of a worker process in the parent process."""

import multiprocessing
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from time import monotonic
from types import ModuleType
from typing import Any

from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper

from rlxf.envs.sb3_vec_env import Make
from rlxf.envs.worker_process import (
    CLOSE,
    SAFE_PATH,
    SAFE_PATH_BEFORE,
    STOP,
    Call,
    CallFailure,
    end_group,
    restore_safe_path,
    sendable_calls,
    serve,
    unwrapped,
)

CLOSE_TIMEOUT = 5.0
"""Timeout in seconds for a process to close its environments."""
MAX_WAIT = 86_400.0
"""Maximum time in seconds of one wait for a message; the system calls refuse times above 24 days."""
STALL_TIMEOUT = 60.0
"""Timeout in seconds of a read or write on the pipe, for a process that stops in the middle of a message."""


class Worker:
    """Process that creates environments and runs calls to them.

    It is started like the processes of Stable-Baselines3's ``SubprocVecEnv``, by a fork server if the
    platform has one: threads of torch do not survive a plain fork. The server has imported the packages, so
    a process starts within milliseconds. The worker, and all processes that its environments started, end
    with this object. If the parent is killed, the worker detects it and ends, once a Python thread can run.

    Args:
        makes: function that creates each environment, by its index.
    """

    def __init__(self, makes: Mapping[int, Make]):
        self.environments = set(makes)
        self._sent_at = monotonic()
        self._request_id = 0
        message = ForkingPickler.dumps(CloudpickleWrapper(dict(makes)))  # fails before the process is started
        context = _context()
        self.pipe, child_pipe = context.Pipe()
        _set_stall_timeout(self.pipe)
        self._process: BaseProcess = context.Process(target=serve, args=(child_pipe,))
        with _without_main(), _without_working_directory():
            self._process.start()
        child_pipe.close()
        with suppress(OSError):  # the process is dead or stalls, which `receive` reports
            self.pipe.send_bytes(message)
        self.end = util.Finalize(self, _end, (self._process, self.pipe), exitpriority=10)
        """End the process at once."""

    def send_calls(self, calls: Mapping[int, Call]) -> None:
        """Send calls by environment; the next `receive` returns only their results.

        Their arguments are sent as in `sendable_calls`.
        """
        arguments = sendable_calls(calls)
        self._sent_at = monotonic()
        self._request_id += 1
        with suppress(OSError):  # the process is dead or stalls, which `receive` reports
            self.pipe.send((self._request_id, list(calls), arguments))

    def receive(self, deadline: float) -> dict[int, Any]:
        """Return the result of each call, or its `CallFailure`; a fatal failure is returned for all
        environments.

        Args:
            deadline: time until which to wait, by ``time.monotonic``.
        """
        try:
            while self._wait_for_message(deadline):
                request_id, results = self.pipe.recv()
                if request_id == self._request_id:
                    return dict(unwrapped(results))
        except BlockingIOError:
            pass  # the process stopped in the middle of its reply
        except (EOFError, OSError):
            self._process.join(CLOSE_TIMEOUT)
            return self._lost(f"failed because its process ended with exit code {self._process.exitcode}")
        waited = monotonic() - self._sent_at
        return self._lost(f"did not answer for {waited:.1f} s, so the process was killed")

    def check_dead(self) -> bool:
        """Discard unread replies, and return whether the process ended between calls.

        A process that stopped in the middle of a reply is ended.
        """
        try:
            while self.pipe.poll():
                self.pipe.recv()
        except BlockingIOError:
            self.end()  # it stopped in the middle of a reply, so later replies could not be read
        except (EOFError, OSError):
            pass
        else:
            return False
        return True

    def remove_envs(self, environments: Iterable[int]) -> None:
        """Close these environments; end the process if no environment is left."""
        self.environments -= set(environments)
        if self.environments:
            self.send_calls(dict.fromkeys(environments, CLOSE))
        else:
            self.end()

    def wait_and_end(self, deadline: float) -> None:
        """Wait until the process has replied to `CLOSE` or the deadline has passed; then end it.

        The process confirms the closing with a reply. If the fork server was killed, the exit of a process
        cannot be detected.

        Args:
            deadline: by ``time.monotonic``.
        """
        self.receive(deadline)
        with suppress(OSError):  # the process is dead or stalls
            self.pipe.send(STOP)
        self._process.join(max(0.0, deadline - monotonic()))
        self.end()

    def _wait_for_message(self, deadline: float) -> bool:
        while not self.pipe.poll(min(max(0.0, deadline - monotonic()), MAX_WAIT)):
            if monotonic() >= deadline:
                return False
        return True

    def _lost(self, cause: str) -> dict[int, Any]:
        self.end()
        return dict.fromkeys(self.environments, CallFailure(cause, fatal=True))


def _context() -> Any:
    """Return the multiprocessing context that Stable-Baselines3 uses, with preloaded modules."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlxf.envs.make"])
    return context


def _set_stall_timeout(pipe: Connection) -> None:
    """Make reads and writes raise `BlockingIOError` after `STALL_TIMEOUT` seconds; only on Unix."""
    if not hasattr(socket, "AF_UNIX"):
        return
    limit = struct.pack("ll", int(STALL_TIMEOUT), int(STALL_TIMEOUT % 1 * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setblocking(True)  # socket.setdefaulttimeout may have changed the default
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep a new process from running the program's script, whose imports may take seconds.

    The fork server cannot preload it: https://github.com/python/cpython/issues/126631. Definitions of the
    script are pickled by value, so the process does not need it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


_ENVIRON_LOCK = threading.Lock()


@contextmanager
def _without_working_directory() -> Iterator[None]:
    """Keep the working directory out of the search path of modules of the processes that are started.

    The fork server, its resource tracker and spawned processes are started with ``python -c``. A file such as
    ``gymnasium.py`` in the working directory, which may be a downloaded run, would otherwise be imported in
    place of the package. Workers then get the search path of the program.
    """
    with _ENVIRON_LOCK:
        os.environ[SAFE_PATH_BEFORE] = os.environ.get(SAFE_PATH, "")
        os.environ[SAFE_PATH] = "1"
        try:
            yield
        finally:
            restore_safe_path()


def _end(process: BaseProcess, pipe: Connection) -> None:
    assert process.pid is not None
    end_group(process.pid)
    process.kill()  # it may not have created its group yet
    process.join(CLOSE_TIMEOUT)
    pipe.close()
