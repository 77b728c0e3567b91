"""Main loop of a worker process, which runs calls to environments, and the messages of both processes."""

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
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import gymnasium
import numpy as np
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper, VecEnvObs, VecEnvStepReturn

from rlxf.envs.sb3_vec_env import Make, is_unnested, make_sync_vec_env
from rlxf.envs.step_checks import with_checked_steps
from rlxf.utils.signals import set_handler

SAFE_PATH, SAFE_PATH_BEFORE = "PYTHONSAFEPATH", "RLXF_SAFE_PATH_BEFORE"
"""Environment variable with which Python does not search the working directory for modules, and the one with
its value in the program that starts a process with it."""


def restore_safe_path() -> None:
    """Restore the variable `SAFE_PATH`, which programs that environments start inherit."""
    before = os.environ.pop(SAFE_PATH_BEFORE, None)
    if before:
        os.environ[SAFE_PATH] = before
    elif before is not None:
        os.environ.pop(SAFE_PATH, None)


restore_safe_path()  # in the fork server, which imports this module, or in a spawned process

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of a method of `WorkerEnv`, and its positional and keyword arguments."""


def call(method: str, *arguments: Any, **keywords: Any) -> Call:
    """Return a call of a method of `WorkerEnv`, to be sent to a worker process."""
    return method, arguments, keywords


CLOSE = call("close")
"""Close the environment, if it was created, and ignore its errors."""
STOP = "stop"
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


class WorkerEnv:
    """Environment in a worker process, wrapped in a vector environment of size 1."""

    def __init__(self, make: Make):
        env = make()
        if not is_unnested(env.observation_space):
            raise TypeError(
                f"the observation space {env.observation_space} is nested or has text, which workers do not "
                f"support: create the environments without workers"
            )
        self._is_stateful = env.has_wrapper_attr("persistent_state")
        self.env = with_checked_steps(make_sync_vec_env([lambda: env]))

    def spaces(self) -> tuple[gymnasium.Space, gymnasium.Space]:
        """Return the observation space and the action space."""
        return self.env.observation_space, self.env.action_space

    def reset(
        self, seed: int | None, options: dict[str, Any], state: dict[str, Any] | None = None
    ) -> tuple[VecEnvObs, dict[str, Any]]:
        """Return the first observation (1, ...) and its info.

        A seed also seeds the global random generators of the process. A ``state`` is the `persistent_state`
        of an environment that this one replaces.
        """
        if state is not None:
            self.env.env_method("load_persistent_state", state)
        if seed is not None:
            self.env.seed(seed)
            set_random_seed(seed % 2**32)
        self.env.set_options(options)
        return self.env.reset(), self.env.reset_infos[0]

    def step(self, actions: np.ndarray) -> tuple[VecEnvStepReturn, dict[str, Any], dict[str, Any] | None]:
        """Return the results of a step with actions (1, ...), the info of the last reset, and the state.

        The state is the `persistent_state` if an episode ended; None if there is none.
        """
        results = self.env.step(actions)
        state = self._persistent_state() if self._is_stateful and results[2][0] else None
        return results, self.env.reset_infos[0], state

    def _persistent_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.env.env_method("persistent_state")[0]
        return state

    def query(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of `VecEnv` and return its result for this environment, or None."""
        results = getattr(self.env, method)(*arguments, **keywords)
        return None if results is None else results[0]


def serve(pipe: Connection) -> None:
    """Run calls until `STOP` is received; each environment is created at its first call.

    If the pipe is closed without `STOP`, the parent was killed, and the process ends with its group at once:
    a normal exit would leave the programs that environments started.

    Args:
        pipe: the first message has the functions that create the environments, by index, in a
            `CloudpickleWrapper`. Each later message has an id, the called environments and their pickled
            calls, or is `STOP`. The reply has the same id, and the result or the `CallFailure` of each call.
    """
    _isolate_process()
    _ignore_parent_signals()
    makes: Mapping[int, Make] = pipe.recv().var
    served: dict[int, WorkerEnv] = {}
    while (message := _receive(pipe)) != STOP:
        request_id, environments, arguments = message
        try:
            calls = unwrapped(ForkingPickler.loads(arguments)) if isinstance(arguments, bytes) else arguments
        except Exception as error:  # classes that this process cannot import raise any exception
            failed = CallFailure.raised(error, "the unpickling of its arguments")
            _send(pipe, request_id, dict.fromkeys(environments, failed))
        else:
            _send(pipe, request_id, {i: _run_call(served, makes, i, call) for i, call in calls.items()})


def _receive(pipe: Connection) -> Any:
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
    """Ignore `SIGNALS`, which only the parent handles, in this process but not in its child processes.

    Cluster schedulers send them to all processes of a job.
    A new program inherits ignored signals, but no handlers, so the worker uses a handler without effect. A
    fork inherits both, so the handlers are reset after a fork.
    """
    set_handler(lambda number, frame: None)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(set_handler, signal.SIG_DFL))


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


def failures_of(results: Mapping[int, Any]) -> dict[int, CallFailure]:
    """Return the failures among the results of calls."""
    return {i: result for i, result in results.items() if isinstance(result, CallFailure)}


def _send(pipe: Connection, request_id: int, results: dict[int, Any]) -> None:
    try:
        pipe.send_bytes(_pickled_reply(request_id, results))
    except OSError:
        return  # the parent has ended


def _pickled_reply(request_id: int, results: dict[int, Any]) -> Any:
    """Return the pickled results, by value if classes of the program's script are among them.

    If they cannot be pickled, as an info with a lock, the reply is a failure.
    """
    with suppress(Exception):
        return ForkingPickler.dumps((request_id, results))
    try:
        return ForkingPickler.dumps((request_id, CloudpickleWrapper(results)))
    except Exception as error:
        fault = CallFailure.raised(error, "the pickling of its results")
        return ForkingPickler.dumps((request_id, dict.fromkeys(results, fault)))


def sendable_calls(calls: Mapping[int, Call]) -> dict[int, Call] | bytes:
    """Return calls for `serve`, pickled except for steps, whose arguments are arrays.

    Arguments of other calls are pickled by value if the program's script defines them, like the functions
    that create the environments.
    """
    if all(method == "step" for method, *_ in calls.values()):
        return dict(calls)
    return bytes(ForkingPickler.dumps(CloudpickleWrapper(dict(calls))))


def unwrapped(message: Any) -> Any:
    """Return the content of a message that may have been pickled by value."""
    return message.var if isinstance(message, CloudpickleWrapper) else message
