"""Wrapper whose current episode can be replayed."""

import hashlib
import json
from collections.abc import Callable
from struct import Struct
from typing import Any

import gymnasium
import numpy as np

from rlxf.envs.gym_api import reset_env
from rlxf.envs.wrappers import TransparentWrapper

MAX_RECORDED_STEPS = 100_000
"""Longest episode whose actions are recorded: the replay of a longer one would take minutes."""


_BYTES_OF: dict[type, Callable[[Any], bytes]] = {
    np.ndarray: np.ndarray.tobytes,
    float: Struct("=d").pack,
    bool: Struct("=?").pack,
}
"""Functions for the types that most environments return: an array for each number would take longer."""


class _ResultHash:
    """Hash of the results of an episode; in contrast to an object of hashlib, deepcopy copies it.

    It can be pickled, too, but the result is unknown afterwards, as objects of hashlib cannot be pickled.
    """

    def __init__(self) -> None:
        self._hash: hashlib.blake2b | None = hashlib.blake2b(digest_size=16)

    def __reduce__(self) -> Any:
        return type(self), (), {"_hash": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ResultHash":
        copied = _ResultHash()
        copied._hash = None if self._hash is None else self._hash.copy()
        return copied

    def update(self, *values: Any) -> None:
        """Add observations, rewards and flags, also nested ones."""
        if self._hash is None:
            return
        for value in values:
            if (to_bytes := _BYTES_OF.get(type(value))) is not None:
                self._hash.update(to_bytes(value))
            elif isinstance(value, dict):
                self.update(*(value[key] for key in sorted(value)))
            elif isinstance(value, tuple):
                self.update(*value)
            else:
                self._hash.update(value.encode() if isinstance(value, str) else np.asarray(value).tobytes())

    def hexdigest(self) -> str | None:
        """Return the hash as hexadecimal digits; None after pickling."""
        return None if self._hash is None else self._hash.hexdigest()


class ActionReplay(TransparentWrapper):
    """Wrapper that resets each episode with its own seed and records the current episode for a replay.

    The first episode after ``reset(seed=s)`` has the seed s. The episode k resets later has the first number
    of ``numpy.random.SeedSequence([s, k])`` as its seed. So the episodes of a seed are the same in any
    process, whatever actions are taken. Without a seed, s is drawn at random.

    An environment that keeps state across a reset with a seed, such as the level of a game, can provide it:
    ``persistent_state()`` returns it as JSON before each reset, also the first one, and
    ``load_persistent_state(state)`` restores it before the reset of a replay. Without these methods, `replay`
    reports that the observations differ. A reset raises TypeError or ValueError if the state is not JSON.

    An episode in which the wrapper was pickled cannot be replayed from the result of unpickling; later
    episodes can.

    Args:
        env: the environment, with all wrappers that change observations.
    """

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._seed: int | None = None
        self._episode = 0
        self._actions: list[Any] = []
        self._options: dict[str, Any] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episode; a seed starts a new sequence of episodes."""
        if seed is None and self._seed is not None:
            self._episode += 1
        else:
            self._episode = 0
            self._seed = int(np.random.SeedSequence().generate_state(1)[0] if seed is None else seed)
        return self._reset_episode(options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, record the action, and update the hash of the results."""
        recorded = action if isinstance(action, np.generic) else np.array(action)  # the step may change it
        observation, reward, terminated, truncated, info = self.env.step(action)
        if len(self._actions) <= MAX_RECORDED_STEPS:
            self._actions.append(recorded)
            self._hash.update(observation, reward, terminated, truncated)
        return observation, reward, terminated, truncated, info

    def record(self) -> dict[str, Any]:
        """Return the record of the current episode, for `replay`.

        Returns:
            "seed" of the sequence, "number" of the episode in it, "actions" (T, ...), "hash" of the results,
            and "state", the persistent state before the episode, if there is one. If the episode cannot be
            replayed, only "lost", the reason. No exception is raised, because it would end the worker process
            of the environment.
        """
        if self._seed is None or self._options:
            return {"lost": f"{self} was reset with options, or not at all"}
        if len(self._actions) > MAX_RECORDED_STEPS:
            return {"lost": f"an episode of {self} is longer than {MAX_RECORDED_STEPS:,} steps"}
        if (digest := self._hash.hexdigest()) is None:
            return {"lost": f"{self} was pickled during its episode"}
        record = {
            "seed": self._seed,
            "number": self._episode,
            "hash": digest,
            "actions": np.array(self._actions),
        }
        return record if self._state is None else record | {"state": self._state}

    def replay(self, record: dict[str, Any]) -> str | None:
        """Replay an episode up to the step at which `record` was called.

        Returns:
            None if the results are the same, else the reason why the replay failed.
        """
        self._seed, self._episode = record["seed"], record["number"]
        try:
            if "state" in record:
                self.env.get_wrapper_attr("load_persistent_state")(record["state"])
            self._reset_episode(None)
            for action in record["actions"]:
                self.step(action[()])
        except Exception as error:  # the environment may differ from the recorded one and raise anything
            return f"{self} cannot be replayed: {error!r}"
        if self._hash.hexdigest() == record["hash"]:
            return None
        return f"{self} with seed {self._seed_of_episode} and the same actions results in a different episode"

    def _reset_episode(self, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        self._actions = []
        self._options = options
        self._hash = _ResultHash()
        stateful = self.env.has_wrapper_attr("persistent_state")
        state = self.env.get_wrapper_attr("persistent_state")() if stateful else None
        self._state = json.loads(json.dumps(state, allow_nan=False))  # a copy, and only if it is JSON
        observation, info = reset_env(self.env, self._seed_of_episode, options)
        self._hash.update(observation)
        return observation, info

    @property
    def _seed_of_episode(self) -> int:
        assert self._seed is not None
        if self._episode == 0:
            return self._seed
        return int(np.random.SeedSequence([self._seed, self._episode]).generate_state(1)[0])
