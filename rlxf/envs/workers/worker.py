"""Options of worker processes, and the handle of a worker process in the parent process."""

import multiprocessing
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from time import monotonic
from types import ModuleType
from typing import Any

from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper

from rlxf.envs.workers import worker_main
from rlxf.envs.workers.worker_main import CLOSE, STOP, Call, CallFailure, Make, end_group, serve

MAX_BACK_OFF = 60.0
"""Maximum delay of a restart in seconds."""
GOOD_STEPS = 1000
"""Steps after a failure that reset the failure count, for tasks whose episodes never end."""


@dataclass(frozen=True)
class Workers:
    """Options of the worker processes in which environments run.

    An environment fails if it raises, if its process dies, or if the process does not reply in time.
    Environments that fail together are restarted together in a new process. The others continue.

    Args:
        number: number of processes. The environments are split evenly over them. With one process per
            environment, an environment that dies or hangs affects no other; fewer processes have less
            overhead.
        timeout: seconds for one step of all environments of a process, including resets at the end of
            episodes, or for a query of attributes or images. All environments wait for the slowest, so a
            hanging environment delays all by this time.
        start_timeout: seconds for the creation and the reset of an environment, including imports; also the
            limit of ``env_method``.
        restarts: maximum number of failures in a row of an environment. A finished episode, or `GOOD_STEPS`
            steps, reset the count.
        back_off: seconds from the first failure to the restart. It doubles with each failure in a row, up to
            `MAX_BACK_OFF`.

    Raises:
        ValueError: if a number is out of range.
    """

    number: int
    timeout: float = 60.0
    start_timeout: float = 120.0
    restarts: int = 5
    back_off: float = 1.0

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"workers must be at least 1, got {self.number}")
        for name in ("timeout", "start_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 seconds, got {getattr(self, name)}")
        if self.restarts < 0:
            raise ValueError(f"restarts must be at least 0, got {self.restarts}")
        if not self.back_off >= 0:
            raise ValueError(f"back_off must be at least 0 seconds, got {self.back_off}")

    def delay(self, breaks: int) -> float:
        """Return the seconds from the last of ``breaks`` failures in a row to the restart."""
        return float(min(self.back_off * 2.0 ** (breaks - 1), MAX_BACK_OFF))

    def split_envs(self, n_envs: int) -> list[range]:
        """Return the environments of each process.

        Raises:
            ValueError: if there are more processes than environments.
        """
        if self.number > n_envs:
            raise ValueError(
                f"workers must be at most the number of environments, {n_envs}, got {self.number}"
            )
        ends = [n_envs * k // self.number for k in range(self.number + 1)]
        return [range(start, end) for start, end in pairwise(ends)]


CLOSE_TIMEOUT = 5.0
"""Timeout in seconds for a process to close its environments."""
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
        self._number = 0
        message = ForkingPickler.dumps(CloudpickleWrapper(dict(makes)))  # fails before the process is started
        context = _context()
        self.pipe, child_pipe = context.Pipe()
        _set_stall_timeout(self.pipe)
        self._process: BaseProcess = context.Process(target=serve, args=(child_pipe,))
        with _without_main():
            self._process.start()
        child_pipe.close()
        with suppress(OSError):  # the process is dead or stalls, which `receive` reports
            self.pipe.send_bytes(message)
        self.end = util.Finalize(self, _end, (self._process, self.pipe), exitpriority=10)
        """End the process at once."""

    def send_calls(self, calls: Mapping[int, Call]) -> None:
        """Send calls by environment; the next `receive` returns only their results."""
        self._sent_at = monotonic()
        self._number += 1
        with suppress(OSError):  # the process is dead or stalls, which `receive` reports
            self.pipe.send((self._number, dict(calls)))

    def receive(self, deadline: float) -> dict[int, Any]:
        """Return the result of each call, or its `CallFailure`; a fatal failure is returned for all
        environments.

        Args:
            deadline: time until which to wait, by ``time.monotonic``.
        """
        try:
            while self.pipe.poll(max(0.0, deadline - monotonic())):
                number, results = self.pipe.recv()
                if number == self._number:
                    return dict(results)
        except BlockingIOError:
            pass  # the process stopped in the middle of its reply
        except (EOFError, OSError):
            self._process.join(CLOSE_TIMEOUT)
            return self._lost(f"lost the process, which ended with exit code {self._process.exitcode}")
        waited = monotonic() - self._sent_at
        return self._lost(f"did not answer for {waited:.1f} s, so the process was killed")

    @property
    def is_dead(self) -> bool:
        """Return whether the process ended between calls, and discard unread replies."""
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

    def request_close(self) -> None:
        """Request the process to close its environments; `wait` must follow."""
        self.send_calls(dict.fromkeys(self.environments, CLOSE))

    def wait(self, deadline: float) -> None:
        """Wait until the process has closed its environments or the deadline has passed; then end it.

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

    def _lost(self, cause: str) -> dict[int, Any]:
        self.end()
        return dict.fromkeys(self.environments, CallFailure(cause, fatal=True))


def _context() -> Any:
    """Return the multiprocessing context that Stable-Baselines3 uses, with preloaded modules."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker_main.__name__, "rlxf.envs.make"])
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


def _end(process: BaseProcess, pipe: Connection) -> None:
    assert process.pid is not None
    end_group(process.pid)
    process.kill()  # it may not have created its group yet
    process.join(CLOSE_TIMEOUT)
    pipe.close()
