"""A process with some environments, from outside."""

import multiprocessing
import os
import socket
import struct
import sys
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

from rlxf.envs.workers import serving
from rlxf.envs.workers.serving import FORGET, Call, Fault, Make, end_group, serve

PATIENCE = 5.0
"""Seconds that a process gets to close its environments."""
STALL = 60.0
"""Seconds in which something of a message has to move: nothing does where a process was stopped amid it."""


class Worker:
    """A process that makes environments and answers for them.

    It is started like those of Stable-Baselines3's ``SubprocVecEnv``, by a fork server where there is one:
    threads of torch do not survive a plain fork. The server has imported what is needed, so a process is
    there within milliseconds. When this object is gone, so is the worker, with all that its environments have
    started; where this process is killed, the worker sees it and ends by itself, once a thread of Python can
    run there.

    Args:
        makes: what makes each environment, by its number.
    """

    def __init__(self, makes: Mapping[int, Make]):
        self.environments = set(makes)
        self._asked_at = monotonic()
        self._number = 0
        message = ForkingPickler.dumps(CloudpickleWrapper(dict(makes)))  # may fail: nothing is started yet
        context = _context()
        self.pipe, theirs = context.Pipe()
        _give_up_what_stalls(self.pipe)
        self._process: BaseProcess = context.Process(target=serve, args=(theirs,))
        with _main_left_out():
            self._process.start()
        theirs.close()
        with suppress(OSError):  # it is dead already or stalls, and `answers` says so
            self.pipe.send_bytes(message)
        self.end = util.Finalize(self, _end, (self._process, self.pipe), exitpriority=10)
        """End the process at once."""

    def ask(self, calls: Mapping[int, Call]) -> None:
        """Send calls by environment; `answers` gives what comes of them, and of nothing asked before."""
        self._asked_at = monotonic()
        self._number += 1
        with suppress(OSError):  # it is dead or stalls, and `answers` says so
            self.pipe.send((self._number, dict(calls)))

    def answers(self, deadline: float) -> dict[int, Any]:
        """The result of each call, or its `Fault`; one that is fatal is that of all environments here.

        Args:
            deadline: by ``time.monotonic``, up to which it is waited for.
        """
        try:
            while self.pipe.poll(max(0.0, deadline - monotonic())):
                number, results = self.pipe.recv()
                if number == self._number:
                    return dict(results)
        except BlockingIOError:
            pass  # it stalls amid its answer
        except (EOFError, OSError):
            self._process.join(PATIENCE)
            return self._lost(f"lost the process, which ended with exit code {self._process.exitcode}")
        waited = monotonic() - self._asked_at
        return self._lost(f"did not answer for {waited:.1f} s, so the process was killed")

    @property
    def is_dead(self) -> bool:
        """Whether the process ended while nobody waited for an answer; those that came meanwhile are gone."""
        try:
            while self.pipe.poll():
                self.pipe.recv()
        except BlockingIOError:
            self.end()  # it stalls amid an answer, of which nobody could read the rest
        except (EOFError, OSError):
            pass
        else:
            return False
        return True

    def leave(self, environments: Iterable[int]) -> None:
        """Go on without these environments, which are closed; with the last of them the process ends."""
        self.environments -= set(environments)
        if self.environments:
            self.ask(dict.fromkeys(environments, FORGET))
        else:
            self.end()

    def dismiss(self) -> None:
        """Let the process close its environments; `wait` is to come."""
        self.ask(dict.fromkeys(self.environments, FORGET))

    def wait(self, deadline: float) -> None:
        """Give a process that was dismissed until then to end, by ``time.monotonic``; then end it.

        That all is closed it has to say itself: where the fork server was killed, nobody tells whether a
        process has ended.
        """
        self.answers(deadline)
        self.pipe.close()
        self._process.join(max(0.0, deadline - monotonic()))
        self.end()

    def _lost(self, cause: str) -> dict[int, Any]:
        self.end()
        return dict.fromkeys(self.environments, Fault(cause, fatal=True))


def _context() -> Any:
    """As Stable-Baselines3 chooses it."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([serving.__name__, "rlxf.envs.make"])
    return context


def _give_up_what_stalls(pipe: Connection) -> None:
    """Let reading and writing raise `BlockingIOError` behind `STALL`; elsewhere than on Unix nothing does."""
    if not hasattr(socket, "AF_UNIX"):
        return
    limit = struct.pack("ll", int(STALL), int(STALL % 1 * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setblocking(True)  # whatever the default is
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Start a process that does not run the program's own script again, whose imports may take seconds.

    The fork server cannot do it once for all: https://github.com/python/cpython/issues/126631. What is
    defined in the script is sent by value, so nothing of it is missed.
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
    process.kill()  # it may have no group yet
    process.join(PATIENCE)
    pipe.close()
