"""State of a training run in a file, from which it resumes bit for bit, with any number of processes.

A file holds the environments of all processes in one sequence, as a single process would write it. Any number
of processes that divides the number of environments can therefore resume from it.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from rlxf.agents.common.checkpoint import check_resumable, check_same_settings, newest_checkpoint_file
from rlxf.agents.gtrxl.checkpoint import read_checkpoint
from rlxf.agents.gtrxl.config import default_n_steps
from rlxf.envs import resume
from rlxf.envs.wrapper_state import load_wrapper_state, wrapper_state
from rlxf.training import Archive
from rlxf.training.compat import checkpoint_errors
from rlxf.training.process_group import ProcessGroup
from rlxf.training.serialization import arrays_to_tensors, tensors_to_arrays
from rlxf.training.states import RNG_GROUP, get_rng_states, set_rng_states
from rlxf.utils.checks import MAX_INT64, check_int
from rlxf.utils.errors import EpisodeLostError
from rlxf.utils.tensorboard import writes_tensorboard

RUN = "run"
ENVIRONMENT, AGENT_STATE, WRAPPERS, EPISODES = "environment", "rollout_state", "wrappers", "episodes"
GRADIENTS = "gradients"
"""Tensor group of the last update's gradients, which `HistogramCallback` logs after the next rollout."""
MATCHING_FIELDS = ("policy", "observation_space", "action_space")
PER_ENVIRONMENT = {"returns", "episode_returns", "episode_lengths", "stacked_obs"}
"""Wrapper attributes with a row for each environment; other attributes are shared by all environments."""

Groups = dict[str, dict[str, Tensor]]


def read_matching_run(document: Mapping[str, Any], path: str | os.PathLike[str]) -> Archive:
    """Read the file of a training run with the same settings as the agent.

    Args:
        document: document of the agent, see `checkpoint.describe`.
        path: path of the file, or of a folder of `CheckpointWriter`.

    Raises:
        FileNotFoundError: if there is no file.
        CheckpointError: if the file is damaged, has other contents, or was not written by `CheckpointWriter`.
        ValueError: if settings or spaces differ from the agent's.
    """
    file = newest_checkpoint_file(path)
    archive = read_checkpoint(file)
    check_resumable(archive, file)
    check_same_settings(_compared(document), _compared(archive.documents["agent"]), file)
    return archive


@checkpoint_errors()
def _compared(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal to resume a run; the default of ``n_steps`` equals its number."""
    settings = document["settings"]
    n_steps = settings["n_steps"] or default_n_steps(settings["n_envs"], settings["segment_length"])
    return settings | {"n_steps": n_steps} | {name: document[name] for name in MATCHING_FIELDS}


def pending_values(logger: Logger) -> dict[str, Any]:
    """Return the recorded values before the next log line: integers, and floats as exact hexadecimal text."""
    return {
        name: [_exact(value), logger.name_to_count[name], logger.name_to_excluded[name] or ()]
        for name, value in logger.name_to_value.items()
        if isinstance(value, int | float | np.number)
    }


def _exact(value: Any) -> int | str:
    """Return a number in an exact JSON format that includes NaN."""
    return int(value) if isinstance(value, int | np.integer) else float(value).hex()


def generator_states(order: torch.Generator) -> dict[str, Tensor]:
    """Return the states of the global random number generators, and of that of the minibatches."""
    return get_rng_states() | {"order": order.get_state()}


def restore_generators(archive: Archive, logger: Logger, order: torch.Generator) -> None:
    """Restore pending log values and random number generators; must be called last."""
    with checkpoint_errors():
        for name, (value, count, excluded) in archive.documents[RUN]["log"].items():
            check_int(f"the number of values of {name!r}", count, 0)
            if isinstance(value, str):
                value = float.fromhex(value)
            else:
                check_int(f"the value of {name!r}", value, -MAX_INT64, MAX_INT64)
            logger.name_to_value[name] = value
            logger.name_to_count[name] = count
            logger.name_to_excluded[name] = tuple(excluded)
        order.set_state(archive.tensors[RNG_GROUP]["order"])
    set_rng_states(archive.tensors[RNG_GROUP])


def gradients(model: nn.Module, logger: Logger) -> dict[str, Tensor]:
    """Return the gradients of the last update if the logger writes TensorBoard events, else {}."""
    if not writes_tensorboard(logger):
        return {}
    named = model.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def restore_gradients(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Restore the result of `gradients`."""
    for name, parameter in model.named_parameters():
        if name in stored:
            parameter.grad = stored[name].to(parameter.device)


def gather_environments(
    env: VecEnv, ranks: ProcessGroup, agent_state: dict[str, Tensor]
) -> tuple[dict[str, Any], Groups]:
    """Return document and tensors of the environments of all processes, and of the agent's state for them.

    Args:
        env: environments of this process.
        ranks: the process group.
        agent_state: state of the agent in these environments, see `RolloutCollector.state_dict`.
    """
    episodes, actions = resume.episode_state_or_reason(env)
    wrappers = arrays_to_tensors(wrapper_state(env))
    return gather_state(
        ranks, episodes, {AGENT_STATE: agent_state, WRAPPERS: wrappers, EPISODES: arrays_to_tensors(actions)}
    )


def restore_wrappers(env: VecEnv, ranks: ProcessGroup, archive: Archive) -> tuple[dict[str, Any], Groups]:
    """Restore the wrappers of the environments, e.g. the statistics of ``VecNormalize``.

    Returns:
        The document of the current episodes, and the tensors of this process.

    Raises:
        CheckpointError: if the contents do not fit the environments.
        ValueError: if the environments have different wrappers.
    """
    with checkpoint_errors():
        document = archive.documents[RUN][ENVIRONMENT]
        environment, own = shard_state(ranks, env.num_envs, document, archive.tensors)
    load_wrapper_state(env, tensors_to_arrays(own[WRAPPERS]))
    return environment, own


def resume_episodes(
    env: VecEnv, ranks: ProcessGroup, document: dict[str, Any], actions: Mapping[str, Tensor]
) -> str | None:
    """Resume the current episodes; return the reason if a process cannot, else None."""
    reason = resume.try_resume_episodes(env, document, tensors_to_arrays(actions))
    reasons = [
        each.documents[resume.LOST_REASON]
        for each in ranks.gather_archives(Archive({resume.LOST_REASON: reason}, {}))
    ]
    return next(filter(None, reasons), None)


def gather_state(
    ranks: ProcessGroup, environment: dict[str, Any], groups: Groups
) -> tuple[dict[str, Any], Groups]:
    """Gather and concatenate the states of all processes, in the order of their environments.

    Args:
        ranks: the process group.
        environment: episodes of this process, a document of `rlxf.envs.resume`.
        groups: tensors of the agent's state, of the wrappers and of the episodes of this process.

    Returns:
        Document and tensors of all environments.
    """
    archives = ranks.gather_archives(Archive({ENVIRONMENT: environment}, groups))
    parts = [each.documents[ENVIRONMENT] for each in archives]
    joined: Groups = {AGENT_STATE: {}, WRAPPERS: {}, EPISODES: {}}
    for group in (AGENT_STATE, WRAPPERS):
        for name, own in groups[group].items():
            axis = _axis(group, name)
            every = [each.tensors[group][name] for each in archives]
            joined[group][name] = own if axis is None else torch.cat(every, dim=axis)
    number = len(groups[AGENT_STATE]["position"])
    for rank, each in enumerate(archives):
        joined[EPISODES] |= _shifted(each.tensors[EPISODES], rank * number)
    return _joined_episodes(parts, number), joined


def shard_state(
    ranks: ProcessGroup, n_envs: int, environment: dict[str, Any], groups: Mapping[str, Mapping[str, Tensor]]
) -> tuple[dict[str, Any], Groups]:
    """Return the shard of this process of the results of `gather_state`.

    Args:
        ranks: the process group; its size divides the number of environments in the file.
        n_envs: environments of each process.
        environment: document of all episodes.
        groups: tensors of all environments.
    """
    rows = ranks.row_slice(n_envs)
    own: Groups = {AGENT_STATE: {}, WRAPPERS: {}}
    for group in own:
        for name, x in groups.get(group, {}).items():
            axis = _axis(group, name)
            own[group][name] = x if axis is None else x.narrow(axis, rows.start, n_envs).contiguous()
    episodes = {
        name: x for name, x in groups.get(EPISODES, {}).items() if rows.start <= _env_number(name) < rows.stop
    }
    document = _shard(environment, n_envs * ranks.world_size, rows)
    return document, own | {EPISODES: _shifted(episodes, -rows.start)}


def _axis(group: str, name: str) -> int | None:
    """Return the axis of environments of a tensor (hidden states have layers first); None if it has none."""
    if group == WRAPPERS:
        return 0 if name.rpartition(".")[2] in PER_ENVIRONMENT else None
    return 1 if name.startswith("memory.") and name.endswith(".hidden") else 0


def _env_number(name: str) -> int:
    """Return the environment of an array of `rlxf.envs.resume.episode_state`, which is part of its name."""
    return int(name.split(".")[1])


def _shifted(tensors: Mapping[str, Tensor], offset: int) -> dict[str, Tensor]:
    """Return the tensors with ``offset`` added to the environment number in their names."""
    named = {}
    for name, x in tensors.items():
        kind, i, *part = name.split(".", 2)
        named[".".join([kind, str(int(i) + offset), *part])] = x
    return named


def _joined_episodes(parts: Sequence[dict[str, Any]], n_envs: int) -> dict[str, Any]:
    """Join documents of `rlxf.envs.resume.episode_state`; if impossible, return only the reason as "lost"."""
    lost = [part for part in parts if resume.LOST_REASON in part]
    if lost or len(parts) == 1:
        return (lost or parts)[0]
    try:
        return dict(_joined(parts, n_envs))
    except EpisodeLostError as error:
        return {resume.LOST_REASON: str(error)}


def _joined(values: Sequence[Any], n_envs: int) -> Any:
    """Join states of ``n_envs`` environments each: lists of that length are concatenated.

    Raises:
        EpisodeLostError: if other values differ.
    """
    first = values[0]
    if isinstance(first, dict):
        return {key: _joined([value[key] for value in values], n_envs) for key in first}
    if isinstance(first, list) and all(len(value) == n_envs for value in values):
        return [row for value in values for row in value]
    if any(value != first for value in values):
        raise EpisodeLostError(
            "the states of environments of several processes differ and are not lists with a row for each "
            "environment"
        )
    return first


def _shard(value: Any, n_envs: int, rows: slice) -> Any:
    if isinstance(value, dict):
        return {key: _shard(part, n_envs, rows) for key, part in value.items()}
    return value[rows] if isinstance(value, list) and len(value) == n_envs else value
