"""Main loop of a worker process, which creates environments and runs calls to them."""

import os
import random
import signal
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, parent_process
from typing import Any, NoReturn

import gymnasium
import numpy as np
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from rlxf.envs.sb3_vec_env import Make, is_unnested, make_sync_vec_env
from rlxf.envs.step_checks import with_checked_steps

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of a method of `EnvServer`, and its positional and keyword arguments."""
PARENT_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")
"""Signals that only the parent handles. Cluster schedulers send them to all processes of a job."""


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


class EnvServer:
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
        """Call a method of `VecEnv` and return its result for this environment."""
        return getattr(self.env, method)(*arguments, **keywords)[0]

    def execute(self, method: str, *arguments: Any) -> None:
        """Call a method of `VecEnv` that has no result."""
        getattr(self.env, method)(*arguments)


def call(method: str, *arguments: Any, **keywords: Any) -> Call:
    """Return a call of a method of `EnvServer`, to be sent to a worker process."""
    return method, arguments, keywords


CLOSE = call("close")
"""Close the environment, if it was created, and ignore its errors."""
STOP = "stop"
"""Message in place of calls, at which the process exits normally."""


def serve(pipe: connection.Connection) -> None:
    """Run calls until `STOP` is received; each environment is created at its first call.

    If the pipe is closed without `STOP`, the parent was killed, and the process ends with its group at once:
    a normal exit would leave the programs that environments started.

    Args:
        pipe: the first message has the functions that create the environments, by index, in a
            `CloudpickleWrapper`. Each later message has a number and the calls by environment, or is `STOP`.
            The reply has the same number, and the result or the `CallFailure` of each call.
    """
    _isolate_process()
    _ignore_parent_signals()
    makes: Mapping[int, Make] = pipe.recv().var
    served: dict[int, EnvServer] = {}
    while (message := _receive(pipe)) != STOP:
        number, calls = message
        _send(pipe, number, {i: _run_call(served, makes, i, call) for i, call in calls.items()})


def _receive(pipe: connection.Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):  # ConnectionResetError: the parent left a reply unread
        _end_at_once()


def _isolate_process() -> None:
    """Start a new session, end with the parent even if an environment hangs, and reseed the generators.

    The process does not notice the end of the parent while native code holds the GIL. Processes that
    environments start are in the process group of the worker and end with it (`end_group`). In a new
    session, Ctrl-C in a terminal reaches only the parent, and terminal access in the background does not
    stop the worker.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    random.seed()
    np.random.seed()  # noqa: NPY002  # for environments that draw from the global generator


def _ignore_parent_signals() -> None:
    """Ignore the signals that only the parent handles, in this process but not in its child processes.

    A new program inherits ignored signals, but no handlers, so the worker uses a handler without effect. A
    fork inherits both, so the handlers are reset after a fork.
    """
    _handle(_do_nothing)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(_handle, signal.SIG_DFL))


def _handle(handler: Any) -> None:
    for name in PARENT_SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), handler)


def _do_nothing(number: int, frame: Any) -> None:
    """Handle a signal without effect."""


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    _end_at_once()


def _end_at_once() -> NoReturn:
    end_group(os.getpid())
    os._exit(1)


def end_group(pid: int) -> None:
    """Kill the process of a worker and all processes in its group.

    The id of a dead process is not reused as long as its process group has members.
    """
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # empty group; on macOS, only dead processes
            os.killpg(pid, signal.SIGKILL)


def _run_call(served: dict[int, EnvServer], makes: Mapping[int, Make], i: int, call: Call) -> Any:
    if call == CLOSE:
        return _close(served, i)
    method, arguments, keywords = call
    try:
        if i not in served:
            served[i] = EnvServer(makes[i])
    except Exception as error:  # environments may raise any exception
        return CallFailure.raised(error, "its constructor")
    try:
        return getattr(served[i], method)(*arguments, **keywords)
    except Exception as error:
        return CallFailure.raised(error, arguments[0] if method in ("query", "execute") else method)


def _close(served: dict[int, EnvServer], i: int) -> None:
    if i in served:
        with suppress(Exception):
            served.pop(i).env.close()


def _send(pipe: connection.Connection, number: int, results: dict[int, Any]) -> None:
    try:
        pipe.send((number, results))
    except OSError:
        return  # the parent has ended
    except Exception as error:  # a result that cannot be pickled, such as an info with a lock
        fault = CallFailure.raised(error, "the pickling of its results")
        pipe.send((number, dict.fromkeys(results, fault)))
