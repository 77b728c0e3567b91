"""Interfaces of environments whose state can be stored, and of environments that can be paused."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.vec_env import VecEnv


class StatefulVectorEnv(ABC):
    """Mixin for a Gymnasium ``VectorEnv`` whose state can be saved and loaded in another process.

    In distributed training, lists in the state with one entry per environment are gathered from and split
    over the ranks. Everything else in the state has to be equal on all ranks.

    Single environments do not need this class: those of `rlxf.envs.make_vec_env` are `ActionReplay`.
    """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state that later steps depend on, with random generators, as JSON without NaN."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state` without a reset.

        If the environment was created with the same arguments, the same steps follow.
        """


class PausableEnv(gymnasium.Wrapper):
    """Wrapper that skips the steps of the environment from `pause_envs` until `wake` or the next reset.

    The episodes of parallel environments end at different times. An environment whose steps are no longer
    used costs as much time as the others, unless it is paused.

    Args:
        env: the environment, in all its other wrappers.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._observation: Any = None
        self._paused = False

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]  # as in `gymnasium.Wrapper`
        """Spec of the wrapped environment, which creates an environment with the same observations."""
        return self.env.spec

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resume, and reset the environment."""
        self._paused = False
        keywords = {} if options is None else {"options": options}  # older environments take no options
        self._observation, info = self.env.reset(seed=seed, **keywords)
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment; while paused, return the last observation, reward 0 and no end."""
        if self._paused:
            return self._observation, 0.0, False, False, {}
        self._observation, *results = self.env.step(action)
        return self._observation, *results

    def rest(self) -> None:
        """Skip all steps until the next reset or `wake`."""
        self._paused = True

    def wake(self) -> None:
        """Continue from the state at which `pause_envs` was called."""
        self._paused = False


def pause_envs(env: VecEnv, rows: Sequence[int]) -> None:
    """Pause the selected environments until all are reset or resumed; no effect without `PausableEnv`."""
    if rows and all(env.env_is_wrapped(PausableEnv)):
        env.env_method("rest", indices=rows)


@contextmanager
def resume_envs_at_exit(env: VecEnv) -> Iterator[None]:
    """Context manager that resumes all paused environments at its end, for other users of the environments.

    After an error, it tries to resume them and raises the original error, even if resuming fails.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):
            _wake(env)
        raise
    _wake(env)


def _wake(env: VecEnv) -> None:
    if all(env.env_is_wrapped(PausableEnv)):
        env.env_method("wake")
