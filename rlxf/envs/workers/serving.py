"""What runs in the process of a worker."""

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
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from rlxf.envs.side_by_side import Make, is_one_level, side_by_side
from rlxf.envs.step_checks import with_checked_steps

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of a method of `Served`, and its arguments."""
LEFT_TO_THE_PARENT = ("SIGINT", "SIGTERM", "SIGUSR1")
"""Cluster schedulers send them to all processes of a job. It is the training that stops."""


@dataclass(frozen=True)
class Fault:
    """Why an environment gave no answer.

    Args:
        cause: one line that goes on from "environment 3 ...".
        traceback: its own, if it raised.
        error: name of the class that it raised.
        fatal: whether the process is lost with it.
    """

    cause: str
    traceback: str = ""
    error: str = ""
    fatal: bool = False

    @classmethod
    def raised(cls, error: Exception, where: str) -> "Fault":
        """That of an exception while ``where``, a method, was called."""
        told = "".join(traceback.format_exception_only(error)).strip()
        *_, place = traceback.extract_tb(error.__traceback__)
        cause = f"raised in {where}: {told} ({place.filename}, line {place.lineno})"
        return cls(cause, traceback.format_exc(), type(error).__name__)


class Served:
    """One environment, with the answers that a ``DummyVecEnv`` of it gives."""

    def __init__(self, make: Make):
        env = make()
        if not is_one_level(env.observation_space):
            raise TypeError(f"{env.observation_space} has parts within parts: such are made without workers")
        self.env = with_checked_steps(side_by_side([lambda: env]))

    def spaces(self) -> tuple[gymnasium.Space, gymnasium.Space]:
        """Of observations and actions."""
        return self.env.observation_space, self.env.action_space

    def reset(self, seed: int | None, options: dict[str, Any]) -> tuple[VecEnvObs, dict[str, Any]]:
        """First observation, (1, ...), and its info; a seed is that of the process's own generators, too."""
        if seed is not None:
            self.env.seed(seed)
            set_random_seed(seed % 2**32)
        self.env.set_options(options)
        return self.env.reset(), self.env.reset_infos[0]

    def step(self, actions: np.ndarray) -> tuple[VecEnvStepReturn, dict[str, Any]]:
        """What one step, (1, ...), gives, and the info of the last reset."""
        return self.env.step(actions), self.env.reset_infos[0]

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """What a method of `VecEnv` gives for this one environment."""
        return getattr(self.env, method)(*arguments, **named)[0]

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of `VecEnv` that gives nothing."""
        getattr(self.env, method)(*arguments)


def call(method: str, *arguments: Any, **named: Any) -> Call:
    """To be sent to a process that serves environments."""
    return method, arguments, named


FORGET = call("forget")
"""Close the environment, if it was made; what that raises is nobody's business any more."""


def serve(pipe: connection.Connection) -> None:
    """Answer calls until the other end is closed; each environment is made when it is first called.

    Args:
        pipe: first what makes the environments comes in, by number, in a `CloudpickleWrapper`; then messages:
            a number, and calls by environment. It goes out again with their results, or a `Fault` each.
    """
    _stand_apart()
    _leave_signals()
    makes: Mapping[int, Make] = pipe.recv().var
    served: dict[int, Served] = {}
    while True:
        try:
            number, calls = pipe.recv()
        except (EOFError, ConnectionResetError):  # the latter where an answer was left unread
            return
        _send(pipe, number, {i: _outcome(served, makes, i, call) for i, call in calls.items()})


def _stand_apart() -> None:
    """End with the parent, even while an environment waits for ever; draw other numbers.

    Native code that holds Python's lock and never gives it back keeps the process from seeing the parent end.
    What environments start is in a group of processes with this one, and ends with it (`end_group`). It is a
    session, too: Ctrl-C in a terminal reaches the training alone, and nobody here can be stopped by a
    terminal that is read or set from the background.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    random.seed()
    np.random.seed()  # noqa: NPY002  # of environments that draw from the global generator


def _leave_signals() -> None:
    """Pass over the signals that are meant for the parent, but not those to what environments start.

    A program that is started inherits what is ignored, but no handler; a fork inherits both.
    """
    _handle(_pass_over)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(_handle, signal.SIG_DFL))


def _handle(handler: Any) -> None:
    for name in LEFT_TO_THE_PARENT:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), handler)


def _pass_over(number: int, frame: Any) -> None:
    """Do nothing."""


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    end_group(os.getpid())
    os._exit(1)


def end_group(pid: int) -> None:
    """Kill the process of a worker and what its environments have started, unless that left the group.

    A process that is dead leads its group as long as somebody is in it, and nobody else gets its number.
    """
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # nobody is in it; on macOS, only the dead are
            os.killpg(pid, signal.SIGKILL)


def _outcome(served: dict[int, Served], makes: Mapping[int, Make], i: int, call: Call) -> Any:
    if call == FORGET:
        return _forget(served, i)
    method, arguments, named = call
    try:
        if i not in served:
            served[i] = Served(makes[i])
    except Exception as error:  # of any kind: it is the environment's own
        return Fault.raised(error, "its constructor")
    try:
        return getattr(served[i], method)(*arguments, **named)
    except Exception as error:
        return Fault.raised(error, arguments[0] if method in ("ask", "tell") else method)


def _forget(served: dict[int, Served], i: int) -> None:
    if i in served:
        with suppress(Exception):
            served.pop(i).env.close()


def _send(pipe: connection.Connection, number: int, results: dict[int, Any]) -> None:
    try:
        pipe.send((number, results))
    except OSError:
        return  # the parent is gone
    except Exception as error:  # an info that cannot be sent, such as a lock
        fault = Fault.raised(error, "what it gave, which no pipe takes")
        pipe.send((number, dict.fromkeys(results, fault)))
