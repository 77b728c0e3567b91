"""State of a ``VecEnv`` for a resumed run: the state of its wrappers and the current episodes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

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

from rlxf.envs.stateful_env import ActionReplay
from rlxf.envs.vector import GymnasiumVecEnv
from rlxf.envs.workers import WorkerVecEnv
from rlxf.envs.wrappers.return_to_go import ReturnToGo
from rlxf.utils.errors import EpisodeLostError

Place = tuple[object, str]
"""An object and the name of its attribute, a number or an array."""


def _of_normalize(wrapper: Any) -> list[Place]:
    obs_rms = wrapper.obs_rms if wrapper.norm_obs else {}
    statistics: list[RunningMeanStd] = list(obs_rms.values()) if isinstance(obs_rms, dict) else [obs_rms]
    parts = [(each, part) for each in [*statistics, wrapper.ret_rms] for part in ("mean", "var", "count")]
    return [(wrapper, "returns"), *parts]


def _of_monitor(wrapper: Any) -> list[Place]:
    return [(wrapper, name) for name in ("episode_returns", "episode_lengths", "episode_count")]


def _of_stack(wrapper: Any) -> list[Place]:
    stacks = getattr(wrapper.stacked_obs, "sub_stacked_observations", {"": wrapper.stacked_obs})
    return [(stack, "stacked_obs") for stack in stacks.values()]


def _of_return_to_go(wrapper: Any) -> list[Place]:
    return [(wrapper, name) for name in ("_target", "_return_to_go", "_time_step", "_previous")]


STATE_ATTRIBUTES: dict[type[VecEnvWrapper], Callable[[Any], list[Place]]] = {
    VecNormalize: _of_normalize,
    VecMonitor: _of_monitor,
    VecFrameStack: _of_stack,
    VecTransposeImage: lambda wrapper: [],
    VecExtractDictObs: lambda wrapper: [],
    VecCheckNan: lambda wrapper: [],
    ReturnToGo: _of_return_to_go,
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
            f"the environment's wrappers have state of shapes {shapes}, those of the run {given}: resume the "
            f"run with the same wrappers and spaces"
        )
    for name, (holder, attribute) in places.items():
        old, array = getattr(holder, attribute), arrays[name]
        setattr(holder, attribute, array.copy() if isinstance(old, np.ndarray) else type(old)(array))


def episode_state(env: VecEnv) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the current episodes, as JSON and arrays, for `resume_episodes`.

    An array is named by its kind and environment. "actions.3" has the actions of the episode of
    environment 3. If that environment failed and has not restarted, "shown.3." has the observation that it
    repeats; the name ends with the key of a Dict, or the index in a Tuple.

    Raises:
        EpisodeLostError: if the episodes cannot be continued: the environments are neither `ActionReplay` nor
            `StatefulVectorEnv`, or the state of a wrapper class is not known.
    """
    _check_known(env)
    if isinstance(env.unwrapped, GymnasiumVecEnv):
        return {"state": env.unwrapped.state()}, {}
    workers = _workers(env)
    records = _records(env, [i for i in range(env.num_envs) if i not in _absent(workers)])
    absent = _absent(workers)  # includes environments that failed during the calls; their records are stale
    records = {i: record for i, record in records.items() if i not in absent}
    _check_replayable(records)
    arrays = {f"actions.{i}": record.pop("actions") for i, record in records.items()}
    arrays |= {f"shown.{i}.{key}": x for i, each in absent.items() for key, x in each.pop("shown").items()}
    records |= absent
    restarts = [] if workers is None else workers.restart_state()
    counts = [{"restarts": each} for each in restarts] or [{}] * env.num_envs
    return {"records": [records[i] | counts[i] for i in range(env.num_envs)]}, arrays


def resume_episodes(env: VecEnv, document: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Continue the episodes of `episode_state` without a reset: the same steps follow.

    Raises:
        EpisodeLostError: if an episode cannot be continued. The caller must then reset the environments; the
            counts of restarts and lost steps are loaded anyway.
    """
    _check_known(env)
    if isinstance(env.unwrapped, GymnasiumVecEnv):
        env.unwrapped.load_state(document["state"])
        return
    records = dict(enumerate(document["records"]))
    absent = {i: record for i, record in records.items() if "absent" in record}
    workers = _workers(env)
    if absent and workers is None:
        raise EpisodeLostError(f"environment {min(absent)} had failed when the run was saved")
    if workers is not None:
        workers.load_restart_state([_counts_of(record) for record in records.values()])
    present = records.keys() - absent.keys()
    _replay(env, {i: records[i] | {"actions": arrays[f"actions.{i}"]} for i in sorted(present)})
    if workers is not None:
        workers.load_failed_envs({i: record | {"shown": _shown(arrays, i)} for i, record in absent.items()})


def _workers(env: VecEnv) -> WorkerVecEnv | None:
    """Return the `WorkerVecEnv` inside all wrappers; None for any other environment."""
    inner = env.unwrapped
    return inner if isinstance(inner, WorkerVecEnv) else None


def _absent(workers: WorkerVecEnv | None) -> dict[int, dict[str, Any]]:
    return {} if workers is None else workers.failed_envs()


def _shown(arrays: Mapping[str, np.ndarray], i: int) -> dict[str, np.ndarray]:
    prefix = f"shown.{i}."
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def _records(env: VecEnv, environments: list[int]) -> dict[int, dict[str, Any]]:
    """Return the records of `ActionReplay.record` for the given environments."""
    if not all(env.env_is_wrapped(ActionReplay, environments)):
        raise EpisodeLostError("the environments are not wrapped in rlxf.envs.ActionReplay")
    return dict(zip(environments, env.env_method("record", indices=environments), strict=True))


def _check_replayable(records: Mapping[int, dict[str, Any]]) -> None:
    for record in records.values():
        if "lost" in record:
            raise EpisodeLostError(record["lost"])


def _replay(env: VecEnv, records: Mapping[int, dict[str, Any]]) -> None:
    workers = _workers(env)
    if workers is None:
        reasons = {i: env.env_method("replay", record, indices=i)[0] for i, record in records.items()}
    else:
        reasons = workers.replay(records)
    for reason in reasons.values():
        if reason is not None:
            raise EpisodeLostError(reason)


def _counts_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return seed, restarts and lost steps; the seed of the episode if the run had no worker processes."""
    counts = record.get("restarts", {"seed": None, "restarts": 0, "lost_steps": 0})
    return counts if counts["seed"] is not None else counts | {"seed": record.get("seed")}


def _places(env: VecEnv) -> Iterator[tuple[str, Place]]:
    for depth, wrapper in enumerate(_wrappers(env)):
        places = STATE_ATTRIBUTES.get(type(wrapper), lambda wrapper: [])(wrapper)
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
