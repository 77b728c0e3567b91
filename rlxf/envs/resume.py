"""Episodes that can be replayed, and the state of a ``VecEnv`` and its wrappers for a resumed run."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import (
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from rlxf.envs.vector import GymnasiumVecEnv, has_filler_rows
from rlxf.envs.worker_vec_env import WorkerVecEnv
from rlxf.envs.wrappers import ReturnToGo, TransparentWrapper
from rlxf.utils.errors import EpisodeLostError

MAX_RECORDED_STEPS = 100_000
"""Longest episode whose actions are recorded: the replay of a longer one would take minutes."""


class ActionReplay(TransparentWrapper):
    """Wrapper that resets each episode with its own seed and records the current episode for a replay.

    The first episode after ``reset(seed=s)`` has the seed s. The episode k resets later has the first number
    of ``numpy.random.SeedSequence([s, k])`` as its seed. So the episodes of a seed are the same in any
    process, whatever actions are taken. Without a seed, s is drawn at random.

    An environment that keeps state across a reset with a seed, such as the level of a game, can provide it:
    ``persistent_state()`` returns it as JSON before each reset, also the first one, and
    ``load_persistent_state(state)`` restores it before the reset of a replay. Without these methods, `replay`
    reports that the observations differ. A reset raises TypeError or ValueError if the state is not JSON.

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
        observation, reward, terminated, truncated, info = self.env.step(action)
        if len(self._actions) <= MAX_RECORDED_STEPS:
            self._actions.append(np.array(action))
            self._update_hash(observation, reward, terminated, truncated)
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
        record = {
            "seed": self._seed,
            "number": self._episode,
            "hash": self._hash.hexdigest(),
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
        self._hash = hashlib.blake2b(digest_size=16)
        stateful = self.env.has_wrapper_attr("persistent_state")
        state = self.env.get_wrapper_attr("persistent_state")() if stateful else None
        self._state = json.loads(json.dumps(state, allow_nan=False))  # a copy, and only if it is JSON
        observation, info = self.reset_inner(self._seed_of_episode, options)
        self._update_hash(observation)
        return observation, info

    @property
    def _seed_of_episode(self) -> int:
        assert self._seed is not None
        if self._episode == 0:
            return self._seed
        return int(np.random.SeedSequence([self._seed, self._episode]).generate_state(1)[0])

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


Place = tuple[object, str]
"""An object and the name of its attribute, a number or an array."""


def _normalize_places(wrapper: Any) -> list[Place]:
    obs_rms = wrapper.obs_rms if wrapper.norm_obs else {}
    statistics: list[RunningMeanStd] = list(obs_rms.values()) if isinstance(obs_rms, dict) else [obs_rms]
    parts = [(each, part) for each in [*statistics, wrapper.ret_rms] for part in ("mean", "var", "count")]
    return [(wrapper, "returns"), *parts]


def _stack_places(wrapper: Any) -> list[Place]:
    stacks = getattr(wrapper.stacked_obs, "sub_stacked_observations", {"": wrapper.stacked_obs})
    return [(stack, "stacked_obs") for stack in stacks.values()]


def _attributes(*names: str) -> Callable[[Any], list[Place]]:
    return lambda wrapper: [(wrapper, name) for name in names]


STATE_ATTRIBUTES: dict[type[VecEnvWrapper], Callable[[Any], list[Place]]] = {
    VecNormalize: _normalize_places,
    VecMonitor: _attributes("episode_returns", "episode_lengths", "episode_count"),
    VecFrameStack: _stack_places,
    VecTransposeImage: _attributes(),
    VecExtractDictObs: _attributes(),
    VecCheckNan: _attributes(),
    ReturnToGo: _attributes("_target", "_return_to_go", "_time_step", "_previous"),
}
"""Attributes in which each wrapper class keeps state between steps."""


def wrapper_state(env: VecEnv) -> dict[str, np.ndarray]:
    """Return copies of the state that the known wrappers around ``env`` keep between steps, by name."""
    return {name: np.array(getattr(*place)) for name, place in _places(env)}


def load_wrapper_state(env: VecEnv, arrays: Mapping[str, np.ndarray]) -> None:
    """Load the arrays of `wrapper_state` into wrappers of the same classes.

    Raises:
        ValueError: if the wrappers or their spaces differ; the wrappers are then unchanged.
    """
    places = dict(_places(env))
    shapes = {name: np.shape(getattr(*place)) for name, place in places.items()}
    given = {name: array.shape for name, array in arrays.items()}
    if shapes != given:
        raise ValueError(
            f"the environment's wrappers have state of shapes {shapes}, but those of the run have "
            f"{given}: resume the run with the same wrappers and spaces"
        )
    for name, (holder, attribute) in places.items():
        old = getattr(holder, attribute)
        array = arrays[name]
        setattr(holder, attribute, array.copy() if isinstance(old, np.ndarray) else type(old)(array))


def episode_state(env: VecEnv) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the current episodes, as JSON and arrays, for `resume_episodes`.

    An array is named by its kind and environment. "actions.3" has the actions of the episode of
    environment 3. If it runs in a worker process, "last_observation.3." has its last observation,
    which it repeats after a failure; the name ends with the key of a Dict, or the index in a Tuple.

    Raises:
        EpisodeLostError: if the episodes cannot be continued: the environments are neither `ActionReplay` nor
            `StatefulVectorEnv`, or the state of a wrapper class is not known.
    """
    _check_known(env)
    if (stateful := _stateful(env)) is not None:
        return {"state": stateful.state()}, {}
    workers = _workers(env)
    records = _records(env, [i for i in range(env.num_envs) if i not in _failed(workers)])
    failed = _failed(workers)  # includes environments that failed during the calls; their records are stale
    records = {i: record for i, record in records.items() if i not in failed}
    _check_not_lost(record.get("lost") for record in records.values())
    arrays = {f"actions.{i}": record.pop("actions") for i, record in records.items()}
    for i, parts in enumerate([] if workers is None else workers.last_observations()):
        arrays |= {f"last_observation.{i}.{key}": x for key, x in parts.items()}
    records |= failed
    restarts = [] if workers is None else workers.restart_state()
    counts = [{"restarts": each} for each in restarts] or [{}] * env.num_envs
    document: dict[str, Any] = {"records": [records[i] | counts[i] for i in range(env.num_envs)]}
    if isinstance(env.unwrapped, GymnasiumVecEnv):
        document["counts"] = env.unwrapped.counts()
    return document, arrays


CREATED_OTHERWISE = (
    "the environments were created in another way than those of the run: by their own vector environment, or "
    "one by one"
)
"""Reason why episodes cannot be continued."""


def resume_episodes(env: VecEnv, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Continue the episodes of `episode_state` without a reset: the same steps follow.

    Raises:
        EpisodeLostError: if an episode cannot be continued. The caller must then reset the environments; the
            counts of restarts and lost steps are loaded anyway.
    """
    _check_known(env)
    stateful = _stateful(env)
    has_counts = isinstance(env.unwrapped, GymnasiumVecEnv)
    if ("state" in document) != (stateful is not None) or ("counts" in document and not has_counts):
        raise EpisodeLostError(CREATED_OTHERWISE)
    if stateful is not None:
        stateful.load_state(document["state"])
        return
    records = dict(enumerate(document["records"]))
    failed = {i: record for i, record in records.items() if "failure_reported" in record}
    replays = {
        i: record | {"actions": arrays[f"actions.{i}"]} for i, record in records.items() if i not in failed
    }
    workers = _workers(env)
    if workers is None:
        if failed:
            raise EpisodeLostError(f"environment {min(failed)} had failed when the run was saved")
        _check_not_lost([env.env_method("replay", record, indices=i)[0] for i, record in replays.items()])
        if isinstance(env.unwrapped, GymnasiumVecEnv):
            if "counts" not in document:
                raise EpisodeLostError(CREATED_OTHERWISE)
            env.unwrapped.load_counts(document["counts"])
        return
    counts = [_counts_of(record) for record in records.values()]
    workers.load_restart_state(counts)
    _check_not_lost(workers.replay(replays).values())
    workers.load_persistent_states(counts)  # only if they belong to these environments
    workers.load_last_observations({i: x for i in records if (x := _last_observation(arrays, i))})
    workers.load_failed_envs(failed)


LOST_REASON = "lost"
"""Key of the reason why the episodes cannot be continued, in place of their state."""


def episode_state_or_reason(env: VecEnv) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return `episode_state`, or a document with `LOST_REASON` if the episodes cannot be continued."""
    try:
        return episode_state(env)
    except EpisodeLostError as error:
        return {LOST_REASON: str(error)}, {}


def try_resume_episodes(
    env: VecEnv, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> str | None:
    """Continue the episodes of `episode_state_or_reason`; return the reason if that is impossible."""
    if LOST_REASON in document:
        return str(document[LOST_REASON])
    try:
        resume_episodes(env, document, arrays)
    except EpisodeLostError as error:
        return str(error)
    return None


def _stateful(env: VecEnv) -> GymnasiumVecEnv | None:
    """Return the `GymnasiumVecEnv` inside all wrappers, unless its environments can be replayed.

    These are all `ActionReplay`. Filler rows cannot be replayed, because the vector environment owns them.
    """
    inner = env.unwrapped
    if not isinstance(inner, GymnasiumVecEnv):
        return None
    replayed = all(inner.env_is_wrapped(ActionReplay)) and not has_filler_rows(env)
    return None if replayed else inner


def _workers(env: VecEnv) -> WorkerVecEnv | None:
    """Return the `WorkerVecEnv` inside all wrappers; None for any other environment."""
    inner = env.unwrapped
    return inner if isinstance(inner, WorkerVecEnv) else None


def _failed(workers: WorkerVecEnv | None) -> dict[int, dict[str, Any]]:
    return {} if workers is None else workers.failed_envs()


def _last_observation(arrays: Mapping[str, np.ndarray], i: int) -> dict[str, np.ndarray]:
    prefix = f"last_observation.{i}."
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def _records(env: VecEnv, environments: list[int]) -> dict[int, dict[str, Any]]:
    """Return the records of `ActionReplay.record` for the given environments."""
    if not all(env.env_is_wrapped(ActionReplay, environments)):
        raise EpisodeLostError("the environments are not wrapped in rlxf.envs.ActionReplay")
    return dict(zip(environments, env.env_method("record", indices=environments), strict=True))


def _check_not_lost(reasons: Iterable[str | None]) -> None:
    for reason in reasons:
        if reason is not None:
            raise EpisodeLostError(reason)


def _counts_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `restart_state` of an environment; that of the episode without worker processes."""
    counts = record.get("restarts", {"seed": None, "restarts": 0, "lost_steps": 0})
    counts = {"persistent_state": record.get("state")} | counts
    return counts if counts["seed"] is not None else counts | {"seed": record.get("seed")}


def _places(env: VecEnv) -> Iterator[tuple[str, Place]]:
    for depth, wrapper in enumerate(_wrappers(env)):
        places = STATE_ATTRIBUTES.get(type(wrapper), _attributes())(wrapper)
        for number, place in enumerate(places):
            yield f"{depth}.{type(wrapper).__name__}.{number}.{place[1]}", place


def _wrappers(env: VecEnv) -> Iterator[VecEnvWrapper]:
    while isinstance(env, VecEnvWrapper):
        yield env
        env = env.venv


def _check_known(env: VecEnv) -> None:
    for wrapper in _wrappers(env):
        if type(wrapper) not in STATE_ATTRIBUTES:
            raise EpisodeLostError(
                f"the state that the wrapper {type(wrapper).__name__} keeps between steps is not known"
            )
