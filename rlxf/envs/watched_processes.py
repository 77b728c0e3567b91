"""Detection of dead processes in a ``SubprocVecEnv``: Stable-Baselines3 waits forever for their reply."""

from multiprocessing.connection import wait
from typing import Any

from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from rlxf.envs.errors import BrokenEnvironmentError

EXIT_SECONDS = 5.0
"""Seconds to wait for the exit code of a process that has closed its pipe."""


class WatchedRemote:
    """Pipe to the process of an environment that raises an error after that process has ended.

    Args:
        env: owner of the pipe.
        number: of the environment.

    Raises:
        BrokenEnvironmentError: from `recv` and `send`, with the number and the exit code.
    """

    def __init__(self, env: SubprocVecEnv, number: int):
        self._env, self._number = env, number
        self._remote, self._process = env.remotes[number], env.processes[number]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._remote, name)

    def recv(self) -> Any:
        """Wait for an answer, or for the end of the process."""
        wait([self._remote, self._process.sentinel])
        try:
            if self._remote.poll():
                return self._remote.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        raise self._gone()

    def send(self, message: Any) -> None:
        """Send a message; closing a process that has ended is not an error."""
        try:
            self._remote.send(message)
        except OSError as error:
            if message[0] != "close":
                raise self._gone() from error

    def _gone(self) -> BrokenEnvironmentError:
        self._env.waiting = False  # else its close() would wait for answers
        self._process.join(EXIT_SECONDS)
        return BrokenEnvironmentError(
            f"environment {self._number} is gone: its process ended with exit code {self._process.exitcode}. "
            f"Its own output says why; make_vec_env(..., workers=Workers(n)) goes on where one breaks"
        )


def watch_processes(env: VecEnv | None) -> None:
    """Let a ``SubprocVecEnv``, also inside wrappers, raise an error if one of its processes dies.

    Args:
        env: any environments; others stay as they are.
    """
    inner = None if env is None else env.unwrapped
    if isinstance(inner, SubprocVecEnv) and not isinstance(inner.remotes[0], WatchedRemote):
        inner.remotes = tuple(WatchedRemote(inner, number) for number in range(inner.num_envs))
