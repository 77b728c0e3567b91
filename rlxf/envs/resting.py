"""Wrapper that pauses an environment in a vector environment."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.vec_env import VecEnv


class Resting(gymnasium.Wrapper):
    """Wrapper that skips the steps of the environment from `rest` until `wake` or the next reset.

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
        """Continue from the state at which `rest` was called."""
        self._paused = False


def rest(env: VecEnv, rows: Sequence[int]) -> None:
    """Pause the selected environments until all are reset or resumed; no effect without `Resting`."""
    if rows and all(env.env_is_wrapped(Resting)):
        env.env_method("rest", indices=rows)


@contextmanager
def awake_at_the_end(env: VecEnv) -> Iterator[None]:
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
    if all(env.env_is_wrapped(Resting)):
        env.env_method("wake")
