"""Environments whose current episode can be stored and continued in another process."""

import hashlib
from abc import ABC, abstractmethod
from typing import Any

import gymnasium
import numpy as np

from rlxf.envs.specs import TransparentWrapper


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


MAX_RECORDED_STEPS = 100_000
"""Longest episode whose actions are recorded: the replay of a longer one would take minutes."""


class ActionReplay(TransparentWrapper):
    """Wrapper that resets each episode with its own seed and records the current episode for a replay.

    The first episode after ``reset(seed=s)`` has the seed s. The episode k resets later has the first number
    of ``numpy.random.SeedSequence([s, k])`` as its seed. So the episodes of a seed are the same in any
    process, whatever actions are taken. Without a seed, s is drawn at random.

    State that an environment keeps across a reset with a seed, such as an episode counter, is not replayed.
    `replay` then reports that the observations differ.

    Args:
        env: the environment, in all wrappers that change observations.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._seed: int | None = None
        self._number = 0
        self._actions: list[Any] = []
        self._options: dict[str, Any] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episode; a seed starts a new sequence of episodes."""
        new_sequence = seed is not None or self._seed is None
        self._number = 0 if new_sequence else self._number + 1
        if new_sequence:
            self._seed = _random_seed() if seed is None else int(seed)
        return self._reset_episode(options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, record the action, and update the hash of the results."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if len(self._actions) <= MAX_RECORDED_STEPS:
            self._actions.append(np.array(action))
            self._update_hash(observation, reward, terminated, truncated)
        return observation, reward, terminated, truncated, info

    def record(self) -> dict[str, Any]:
        """Return the record of the current episode, for `replay`.

        Returns:
            "seed" of the sequence, "number" of the episode in it, "actions" (T, ...), and "hash" of the
            results. If the episode cannot be replayed, only "lost", the reason. An exception would end the
            worker process of the environment.
        """
        if self._seed is None or self._options:
            return {"lost": f"{self} was reset with options, or not at all"}
        if len(self._actions) > MAX_RECORDED_STEPS:
            return {"lost": f"an episode of {self} is longer than {MAX_RECORDED_STEPS:,} steps"}
        return {
            "seed": self._seed,
            "number": self._number,
            "hash": self._hash.hexdigest(),
            "actions": np.array(self._actions),
        }

    def replay(self, record: dict[str, Any]) -> str | None:
        """Replay an episode up to the step at which `record` was called.

        Returns:
            None if the results are the same, else the reason why the replay failed.
        """
        self._seed, self._number = record["seed"], record["number"]
        try:
            self._reset_episode(None)
            for action in record["actions"]:
                self.step(action[()])
        except Exception as error:  # the environment may differ from the recorded one and raise anything
            return f"{self} cannot be replayed: {error!r}"
        if self._hash.hexdigest() == record["hash"]:
            return None
        return f"{self} with seed {self._seed_of_episode} and the same actions gives another episode"

    def _reset_episode(self, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        self._actions, self._options, self._hash = [], options, hashlib.blake2b(digest_size=16)
        observation, info = self.reset_inner(self._seed_of_episode, options)
        self._update_hash(observation)
        return observation, info

    @property
    def _seed_of_episode(self) -> int:
        assert self._seed is not None
        if self._number == 0:
            return self._seed
        return int(np.random.SeedSequence([self._seed, self._number]).generate_state(1)[0])

    def _update_hash(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, dict):
                self._update_hash(*(value[key] for key in sorted(value)))
            elif isinstance(value, tuple):
                self._update_hash(*value)
            else:
                self._hash.update(_as_bytes(value))


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes()


def _random_seed() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])
