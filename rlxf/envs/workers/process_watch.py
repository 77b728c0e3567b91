"""Detection of dead processes in a ``SubprocVecEnv``, for whose reply Stable-Baselines3 waits forever."""

from multiprocessing.connection import wait
from typing import Any

from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from rlxf.envs.errors import BrokenEnvironmentError

EXIT_SECONDS = 5.0
"""Seconds to wait for the exit code of a process that has closed its pipe."""


class WatchedRemote:
    """Pipe to the process of an environment, which raises an error if that process has ended.

    Args:
        env: vector environment that owns the pipe.
        number: index of the environment.

    Raises:
        BrokenEnvironmentError: from `recv` and `send`, with the index and the exit code.
    """

    def __init__(self, env: SubprocVecEnv, number: int):
        self._env, self._number = env, number
        self._remote, self._process = env.remotes[number], env.processes[number]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._remote, name)

    def recv(self) -> Any:
        """Wait for a reply, or for the end of the process."""
        wait([self._remote, self._process.sentinel])
        try:
            if self._remote.poll():
                return self._remote.recv()
        except (EOFError, OSError) as error:
            raise self._dead_process_error() from error
        raise self._dead_process_error()

    def send(self, message: Any) -> None:
        """Send a message; closing a process that has ended is not an error."""
        try:
            self._remote.send(message)
        except OSError as error:
            if message[0] != "close":
                raise self._dead_process_error() from error

    def _dead_process_error(self) -> BrokenEnvironmentError:
        self._env.waiting = False  # otherwise its close() waits for replies
        self._process.join(EXIT_SECONDS)
        return BrokenEnvironmentError(
            f"the process of environment {self._number} ended with exit code {self._process.exitcode}; its "
            f"output has the reason. make_vec_env(..., workers=Workers(n)) restarts environments that fail"
        )


def watch_processes(env: VecEnv | None) -> None:
    """Make a ``SubprocVecEnv``, also inside wrappers, raise an error if one of its processes dies.

    Args:
        env: any vector environment; other classes are unchanged.
    """
    inner = None if env is None else env.unwrapped
    if isinstance(inner, SubprocVecEnv) and not isinstance(inner.remotes[0], WatchedRemote):
        inner.remotes = tuple(WatchedRemote(inner, number) for number in range(inner.num_envs))
