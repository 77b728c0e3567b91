"""Worker process: its main loop, which runs calls to environments, and its handle in the parent process."""

import multiprocessing
import os
import random
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, parent_process, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from time import monotonic
from types import ModuleType
from typing import Any, NoReturn

import gymnasium
import numpy as np
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper, VecEnvObs, VecEnvStepReturn

from rlxf.envs.sb3_vec_env import Make, is_unnested, make_sync_vec_env
from rlxf.envs.step_checks import with_checked_steps

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of a method of `WorkerEnv`, and its positional and keyword arguments."""


def call(method: str, *arguments: Any, **keywords: Any) -> Call:
    """Return a call of a method of `WorkerEnv`, to be sent to a worker process."""
    return method, arguments, keywords


CLOSE = call("close")
"""Close the environment, if it was created, and ignore its errors."""
_STOP = "stop"
"""Message that is sent instead of calls; the process then exits normally."""


@dataclass(frozen=True)
class CallFailure:
    """Failure of a call to an environment.

    Args:
        cause: one line that continues "environment 3 ...".
        traceback: traceback of the environment, if it raised.
        error: name of the class of the exception, if it raised.
        fatal: whether the process is lost.
    """

    cause: str
    traceback: str = ""
    error: str = ""
    fatal: bool = False

    @classmethod
    def raised(cls, error: Exception, where: str) -> "CallFailure":
        """Return the failure for an exception raised in ``where``, for example the name of a method."""
        message = "".join(traceback.format_exception_only(error)).strip()
        *_, frame = traceback.extract_tb(error.__traceback__)
        cause = f"raised in {where}: {message} ({frame.filename}, line {frame.lineno})"
        return cls(cause, traceback.format_exc(), type(error).__name__)


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
        self._request_id = 0
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
        self._request_id += 1
        with suppress(OSError):  # the process is dead or stalls, which `receive` reports
            self.pipe.send((self._request_id, dict(calls)))

    def receive(self, deadline: float) -> dict[int, Any]:
        """Return the result of each call, or its `CallFailure`; a fatal failure is returned for all
        environments.

        Args:
            deadline: time until which to wait, by ``time.monotonic``.
        """
        try:
            while self.pipe.poll(max(0.0, deadline - monotonic())):
                request_id, results = self.pipe.recv()
                if request_id == self._request_id:
                    return dict(results)
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
            self.pipe.send(_STOP)
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


def _end(process: BaseProcess, pipe: Connection) -> None:
    assert process.pid is not None
    _end_group(process.pid)
    process.kill()  # it may not have created its group yet
    process.join(CLOSE_TIMEOUT)
    pipe.close()


class WorkerEnv:
    """Environment in a worker process, wrapped in a vector environment of size 1."""

    def __init__(self, make: Make):
        env = make()
        if not is_unnested(env.observation_space):
            raise TypeError(
                f"the observation space {env.observation_space} is nested or has text, which workers do not "
                f"support: create the environments without workers"
            )
        self.env = with_checked_steps(make_sync_vec_env([lambda: env]))

    def spaces(self) -> tuple[gymnasium.Space, gymnasium.Space]:
        """Return the observation space and the action space."""
        return self.env.observation_space, self.env.action_space

    def reset(self, seed: int | None, options: dict[str, Any]) -> tuple[VecEnvObs, dict[str, Any]]:
        """Return the first observation (1, ...) and its info.

        A seed also seeds the global random generators of the process.
        """
        if seed is not None:
            self.env.seed(seed)
            set_random_seed(seed % 2**32)
        self.env.set_options(options)
        return self.env.reset(), self.env.reset_infos[0]

    def step(self, actions: np.ndarray) -> tuple[VecEnvStepReturn, dict[str, Any]]:
        """Return the results of a step with actions (1, ...), and the info of the last reset."""
        return self.env.step(actions), self.env.reset_infos[0]

    def query(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of `VecEnv` and return its result for this environment, or None."""
        results = getattr(self.env, method)(*arguments, **keywords)
        return None if results is None else results[0]


def serve(pipe: Connection) -> None:
    """Run calls until `_STOP` is received; each environment is created at its first call.

    If the pipe is closed without `_STOP`, the parent was killed, and the process ends with its group at once:
    a normal exit would leave the programs that environments started.

    Args:
        pipe: the first message has the functions that create the environments, by index, in a
            `CloudpickleWrapper`. Each later message has an id and the calls by environment, or is `_STOP`.
            The reply has the same id, and the result or the `CallFailure` of each call.
    """
    _isolate_process()
    _ignore_parent_signals()
    makes: Mapping[int, Make] = pipe.recv().var
    served: dict[int, WorkerEnv] = {}
    while (message := _receive(pipe)) != _STOP:
        request_id, calls = message
        _send(pipe, request_id, {i: _run_call(served, makes, i, call) for i, call in calls.items()})


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):  # ConnectionResetError: the parent left a reply unread
        _end_at_once()


def _isolate_process() -> None:
    """Start a new session, end with the parent even if an environment hangs, and reseed the generators.

    The process does not notice the end of the parent while native code holds the GIL. Processes that
    environments start are in the process group of the worker and end with it (`_end_group`). In a new
    session, Ctrl-C in a terminal reaches only the parent, and terminal access in the background does not
    stop the worker.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    random.seed()
    np.random.seed()  # noqa: NPY002  # for environments that draw from the global generator


_PARENT_SIGNALS = [name for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
"""Signals that only the parent handles. Cluster schedulers send them to all processes of a job."""


def _ignore_parent_signals() -> None:
    """Ignore the signals that only the parent handles, in this process but not in its child processes.

    A new program inherits ignored signals, but no handlers, so the worker uses a handler without effect. A
    fork inherits both, so the handlers are reset after a fork.
    """
    _handle(lambda number, frame: None)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(_handle, signal.SIG_DFL))


def _handle(handler: Any) -> None:
    for name in _PARENT_SIGNALS:
        signal.signal(getattr(signal, name), handler)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    _end_at_once()


def _end_at_once() -> NoReturn:
    _end_group(os.getpid())
    os._exit(1)


def _end_group(pid: int) -> None:
    """Kill the process of a worker and all processes in its group.

    The id of a dead process is not reused as long as its process group has members.
    """
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # empty group; on macOS, only dead processes
            os.killpg(pid, signal.SIGKILL)


def _run_call(served: dict[int, WorkerEnv], makes: Mapping[int, Make], i: int, call: Call) -> Any:
    if call == CLOSE:
        with suppress(Exception):  # the environment was not created, or fails
            served.pop(i).env.close()
        return None
    method, arguments, keywords = call
    where = "its constructor"
    try:
        if i not in served:
            served[i] = WorkerEnv(makes[i])
        where = arguments[0] if method == "query" else method
        return getattr(served[i], method)(*arguments, **keywords)
    except Exception as error:  # environments may raise any exception
        return CallFailure.raised(error, where)


def _send(pipe: Connection, request_id: int, results: dict[int, Any]) -> None:
    try:
        pipe.send((request_id, results))
    except OSError:
        return  # the parent has ended
    except Exception as error:  # a result that cannot be pickled, such as an info with a lock
        fault = CallFailure.raised(error, "the pickling of its results")
        pipe.send((request_id, dict.fromkeys(results, fault)))
