"""Current episodes of a ``VecEnv`` for a resumed run."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.action_replay import ActionReplay
from rlxf.envs.filler_rows import has_filler_rows
from rlxf.envs.vector import GymnasiumVecEnv
from rlxf.envs.worker_vec_env import WorkerVecEnv
from rlxf.envs.wrapper_state import check_known_wrappers
from rlxf.utils.errors import EpisodeLostError


def episode_state(env: VecEnv) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the current episodes, as JSON and arrays, for `resume_episodes`.

    An array is named by its kind and environment. "actions.3" has the actions of the episode of
    environment 3. If it runs in a worker process, "last_observation.3." has its last observation,
    which it repeats after a failure; the name ends with the key of a Dict, or the index in a Tuple.

    Raises:
        EpisodeLostError: if the episodes cannot be continued: the environments are neither `ActionReplay` nor
            `StatefulVectorEnv`, or the state of a wrapper class is not known.
    """
    check_known_wrappers(env)
    if (stateful := _stateful(env)) is not None:
        return {"state": stateful.state()}, {}
    if (workers := _workers(env)) is not None:
        return _state_of_workers(env, workers)
    return _state_of_replays(env)


def _state_of_replays(env: VecEnv) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the state of environments that are all `ActionReplay` in this process."""
    records = _records(env, list(range(env.num_envs)))
    arrays = _taken_actions(records)
    document: dict[str, Any] = {"records": list(records.values())}
    if isinstance(env.unwrapped, GymnasiumVecEnv):
        document["counts"] = env.unwrapped.episode_state()
    return document, arrays


def _state_of_workers(env: VecEnv, workers: WorkerVecEnv) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the state of environments in worker processes, some of which may have failed."""
    records = _records(env, [i for i in range(env.num_envs) if i not in workers.failed_envs()])
    failed = workers.failed_envs()  # includes those that failed during the calls; their records are stale
    records = {i: record for i, record in records.items() if i not in failed}
    arrays = _taken_actions(records)
    for i, parts in enumerate(workers.last_observations()):
        arrays |= {f"last_observation.{i}.{key}": x for key, x in parts.items()}
    records |= failed
    counts = [{"restarts": each} for each in workers.restart_state()] or [{}] * env.num_envs
    return {"records": [records[i] | counts[i] for i in range(env.num_envs)]}, arrays


def _taken_actions(records: Mapping[int, dict[str, Any]]) -> dict[str, np.ndarray]:
    """Remove the actions from records, and return them as named arrays.

    Raises:
        EpisodeLostError: if an episode cannot be replayed.
    """
    _check_not_lost(record.get("lost") for record in records.values())
    return {f"actions.{i}": record.pop("actions") for i, record in records.items()}


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
    check_known_wrappers(env)
    stateful = _stateful(env)
    has_counts = isinstance(env.unwrapped, GymnasiumVecEnv)
    if ("state" in document) != (stateful is not None) or ("counts" in document and not has_counts):
        raise EpisodeLostError(CREATED_OTHERWISE)
    if stateful is not None:
        stateful.load_state(document["state"])
    elif (workers := _workers(env)) is not None:
        _resume_workers(workers, document["records"], arrays)
    else:
        _resume_replays(env, document, arrays)


def _resume_replays(env: VecEnv, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Continue the episodes of environments that are all `ActionReplay` in this process."""
    failed, replays = _failed_and_replays(document["records"], arrays)
    if failed:
        raise EpisodeLostError(f"environment {min(failed)} had failed when the run was saved")
    _check_not_lost([env.env_method("replay", record, indices=i)[0] for i, record in replays.items()])
    if isinstance(env.unwrapped, GymnasiumVecEnv):
        if "counts" not in document:
            raise EpisodeLostError(CREATED_OTHERWISE)
        env.unwrapped.load_episode_state(document["counts"])


def _resume_workers(
    workers: WorkerVecEnv, records: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]
) -> None:
    """Continue the episodes of environments in worker processes."""
    failed, replays = _failed_and_replays(records, arrays)
    counts = [_counts_of(record) for record in records]
    workers.load_restart_state(counts)
    _check_not_lost(workers.replay(replays).values())
    workers.load_persistent_states(counts)  # only if they belong to these environments
    observations = {i: _last_observation(arrays, i) for i in range(len(records))}
    workers.load_last_observations({i: parts for i, parts in observations.items() if parts})
    workers.load_failed_envs(failed)


def _failed_and_replays(
    records: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """Return the records of failed environments, and those of the others with their actions."""
    numbered = {i: dict(record) for i, record in enumerate(records)}
    failed = {i: record for i, record in numbered.items() if "failure_reported" in record}
    others = {i: record for i, record in numbered.items() if i not in failed}
    return failed, {i: record | {"actions": arrays[f"actions.{i}"]} for i, record in others.items()}


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

    These are all `ActionReplay`. Reset steps cannot be replayed, because the vector environment owns them.
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
