"""Episodes that can be played again: each begins with a seed of its own, and its actions are kept."""

import hashlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

MOST_STEPS = 100_000
"""Of an episode whose actions are kept: playing a longer one again would take minutes."""


class Replayable(gymnasium.Wrapper):
    """Resets each episode with a seed of its own, and keeps what it takes to play the episode at hand again.

    The first episode after ``reset(seed=s)`` has the seed s, the one k resets later has the first number of
    ``numpy.random.SeedSequence([s, k])``. So the episodes of a seed are the same in any process, whatever was
    played in them. Without a seed, s is drawn.

    What an environment keeps over a reset with a seed, such as the count of its episodes, is not played
    again: `replay` finds that what is seen differs.

    Args:
        env: the environment, in all wrappers that change what is seen.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._seed: int | None = None
        self._number = 0
        self._actions: list[Any] = []
        self._options: dict[str, Any] | None = None

    @property
    def spec(self) -> EnvSpec | None:  # type: ignore[override]  # as in `gymnasium.Wrapper`
        """Of the environment inside: made again by it, it shows the same."""
        return self.env.spec

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode; a seed begins a new row of them."""
        fresh = seed is not None or self._seed is None
        self._number = 0 if fresh else self._number + 1
        if fresh:
            self._seed = _drawn() if seed is None else int(seed)
        return self._begin(options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, and keep the action and a hash of what was seen."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if len(self._actions) <= MOST_STEPS:
            self._actions.append(np.array(action))
            self._note(observation, reward, terminated, truncated)
        return observation, reward, terminated, truncated, info

    def record(self) -> dict[str, Any]:
        """The episode at hand: seed of the row, number in it, actions (T, ...), and hash of what was seen.

        It has "lost", the reason, if the episode cannot be played again. Nothing is raised: that would end a
        process of its own.
        """
        if self._seed is None or self._options:
            return {"lost": f"{self} was reset with options, or not at all"}
        if len(self._actions) > MOST_STEPS:
            return {"lost": f"an episode of {self} is longer than {MOST_STEPS:,} steps"}
        return {
            "seed": self._seed,
            "number": self._number,
            "hash": self._seen.hexdigest(),
            "actions": np.array(self._actions),
        }

    def replay(self, record: dict[str, Any]) -> str | None:
        """Play an episode again, up to where `record` was taken: None, or why it is not the same."""
        self._seed, self._number = record["seed"], record["number"]
        try:
            self._begin(None)
            for action in record["actions"]:
                self.step(action[()])
        except Exception as error:  # of the environment, which is here asked for what may be impossible
            return f"{self} cannot be played again: {error!r}"
        if self._seen.hexdigest() == record["hash"]:
            return None
        return f"{self} with seed {self._seed_of_episode} and the same actions shows another episode"

    def _begin(self, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        self._actions, self._options, self._seen = [], options, hashlib.blake2b(digest_size=16)
        asked = {} if options is None else {"options": options}  # older environments do not know them
        observation, info = self.env.reset(seed=self._seed_of_episode, **asked)
        self._note(observation)
        return observation, info

    @property
    def _seed_of_episode(self) -> int:
        assert self._seed is not None
        if self._number == 0:
            return self._seed
        return int(np.random.SeedSequence([self._seed, self._number]).generate_state(1)[0])

    def _note(self, *seen: Any) -> None:
        for part in seen:
            if isinstance(part, dict):
                self._note(*(part[key] for key in sorted(part)))
            elif isinstance(part, tuple):
                self._note(*part)
            else:
                self._seen.update(_as_bytes(part))


def _as_bytes(part: Any) -> bytes:
    return part.encode() if isinstance(part, str) else np.ascontiguousarray(part).tobytes()


def _drawn() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])
