"""Vector environments of Stable-Baselines3: creation, pauses, and detection of dead processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from rlxf.data.spaces import FLAT, parts_of
from rlxf.envs.gym_api import reset_env
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.envs.wrappers import OwnLastObservation
from rlxf.utils.errors import BrokenEnvironmentError

Make = Callable[[], gymnasium.Env]


def make_sync_vec_env(makes: Sequence[Make]) -> VecEnv:
    """Create one environment with each function, as a vector environment that steps them one by one.

    It is a `DummyVecEnv` of `PausableEnv` environments. A `DummyVecEnv` supports neither nested Dict or Tuple
    spaces nor text. For these, the function uses Gymnasium's `SyncVectorEnv` under the same interface and
    with the same seeds; its environments cannot be paused.

    Raises:
        TypeError: if a space is not supported (`check_playable`).
    """
    with ExitStack() as stack:  # if one of them fails, those before it are closed
        envs = [stack.enter_context(closing(make())) for make in makes]
        stack.pop_all()
    if is_unnested(envs[0].observation_space):
        return DummyVecEnv([partial(PausableEnv, env) for env in envs])
    env_fns = [partial(OwnLastObservation, env) for env in envs]
    return as_vec_env(SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP))


def is_unnested(space: spaces.Space[Any]) -> bool:
    """Return whether a `DummyVecEnv` supports the observation space: no nested parts and no text."""
    parts = parts_of(space).values() if isinstance(space, spaces.Dict | spaces.Tuple) else [space]
    return all(isinstance(part, FLAT) for part in parts)


class PausableEnv(OwnLastObservation):
    """Wrapper that skips the steps of the environment from `pause_envs` until `resume` or the next reset.

    The episodes of parallel environments end at different times. An environment whose steps are no longer
    used costs as much time as the others, unless it is paused.

    Args:
        env: the environment, with all its other wrappers.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._observation: Any = None
        self._paused = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resume, and reset the environment."""
        self._paused = False
        self._observation, info = reset_env(self.env, seed, options)
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment; while paused, return the last observation, reward 0 and no end."""
        if self._paused:
            return self._observation, 0.0, False, False, {}
        results = super().step(action)
        self._observation = results[0]
        return results

    def pause(self) -> None:
        """Skip all steps until the next reset or `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Continue from the state at which `pause_envs` was called."""
        self._paused = False


def pause_envs(env: VecEnv, rows: Sequence[int]) -> None:
    """Pause the selected environments until all are reset or resumed; no effect without `PausableEnv`."""
    if rows and all(env.env_is_wrapped(PausableEnv)):
        env.env_method("pause", indices=rows)


@contextmanager
def resume_envs_at_exit(env: VecEnv) -> Iterator[None]:
    """Context manager that resumes all paused environments at its end, for other users of the environments.

    After an error, it tries to resume them and raises the original error, even if resuming fails.
    """

    def resume() -> None:
        if all(env.env_is_wrapped(PausableEnv)):
            env.env_method("resume")

    with calling_at_exit(resume):
        yield


@contextmanager
def calling_at_exit(function: Callable[[], object]) -> Iterator[None]:
    """Context manager that calls a function at its end; after an error, its own errors are ignored."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            function()
        raise
    function()


EXIT_SECONDS = 5.0
"""Seconds to wait for the exit code of a process that has closed its pipe."""


class WatchedRemote:
    """Pipe to the process of an environment, which raises an error if that process has ended.

    Args:
        env: vector environment that owns the pipe.
        index: index of the environment.

    Raises:
        BrokenEnvironmentError: from `recv` and `send`, with the index and the exit code.
    """

    def __init__(self, env: SubprocVecEnv, index: int):
        self._env, self._index = env, index
        self._remote = env.remotes[index]
        self._process = env.processes[index]

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
            f"the process of environment {self._index} ended with exit code {self._process.exitcode}; its "
            f"output has the reason. make_vec_env(..., workers=Workers(n)) restarts environments that fail"
        )


def watch_processes(env: VecEnv | None) -> None:
    """Make a ``SubprocVecEnv``, even inside wrappers, raise an error if one of its processes dies.

    Args:
        env: any vector environment; other classes are unchanged.
    """
    inner = None if env is None else env.unwrapped
    if isinstance(inner, SubprocVecEnv) and not isinstance(inner.remotes[0], WatchedRemote):
        inner.remotes = tuple(WatchedRemote(inner, i) for i in range(inner.num_envs))
