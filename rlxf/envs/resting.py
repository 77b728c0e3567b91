"""Environments that are not asked to play on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.vec_env import VecEnv


class Resting(gymnasium.Wrapper):
    """Plays as the environment does, but not from `rest` to `wake` or the next reset: nothing happens then.

    Episodes that run side by side end at different times. A physics engine that still moves where nobody
    looks any more costs as much as one that is looked at.

    Args:
        env: the environment, in all its other wrappers.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._seen: Any = None
        self._rests = False

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]  # as in `gymnasium.Wrapper`
        """Of the environment inside: made again by it, it shows the same."""
        return self.env.spec

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Wake, and reset the environment."""
        self._rests = False
        asked = {} if options is None else {"options": options}  # older environments do not know them
        self._seen, info = self.env.reset(seed=seed, **asked)
        return self._seen, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment; at rest, show what was seen last, with reward 0, and end nothing."""
        if self._rests:
            return self._seen, 0.0, False, False, {}
        self._seen, *others = self.env.step(action)
        return self._seen, *others

    def rest(self) -> None:
        """Do nothing until the next reset, or `wake`."""
        self._rests = True

    def wake(self) -> None:
        """Go on where it was when it was told to rest."""
        self._rests = False


def rest(env: VecEnv, rows: Sequence[int]) -> None:
    """Tell the chosen environments to rest until all are reset or woken; those that cannot go on playing."""
    if rows and all(env.env_is_wrapped(Resting)):
        env.env_method("rest", indices=rows)


@contextmanager
def awake_at_the_end(env: VecEnv) -> Iterator[None]:
    """Whoever rests meanwhile goes on afterwards: others may play in the same environments.

    Behind an error that is tried, too, but it is that error that is told: it may be why none can be woken.
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
