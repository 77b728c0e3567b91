"""Sharding of environment states between the processes of a distributed training.

A file holds the environments of all processes in one sequence, as a single process would write it. Any number
of processes that divides the number of environments can therefore resume from it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlxf.training import Archive
from rlxf.training.distributed.group import ProcessGroup
from rlxf.utils.errors import EpisodeLostError

ENVIRONMENT, AGENT_STATE, WRAPPERS, EPISODES = "environment", "stand", "wrappers", "episodes"
LOST = "lost"
PER_ENVIRONMENT = {"returns", "episode_returns", "episode_lengths", "stacked_obs"}
"""Wrapper attributes with a row for each environment; other attributes are shared by all environments."""

Groups = dict[str, dict[str, Tensor]]


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
    for name in groups[AGENT_STATE]:
        joined[AGENT_STATE][name] = torch.cat(
            [each.tensors[AGENT_STATE][name] for each in archives], dim=_axis(name)
        )
    for name, own in groups[WRAPPERS].items():
        whole = torch.cat([each.tensors[WRAPPERS][name] for each in archives]) if _per_env(name) else own
        joined[WRAPPERS][name] = whole
    number = len(groups[AGENT_STATE]["position"])
    for rank, each in enumerate(archives):
        joined[EPISODES] |= _shifted(each.tensors[EPISODES], rank * number)
    return _joined_episodes(parts, number), joined


def shard_state(
    ranks: ProcessGroup, number: int, environment: dict[str, Any], groups: Mapping[str, Mapping[str, Tensor]]
) -> tuple[dict[str, Any], Groups]:
    """Return the shard of this process of the results of `gather_state`.

    Args:
        ranks: the process group; its size divides the number of environments in the file.
        number: environments of each process.
        environment: document of all episodes.
        groups: tensors of all environments.
    """
    rows = ranks.rows(number)
    own: Groups = {AGENT_STATE: {}, WRAPPERS: {}}
    for name, x in groups.get(AGENT_STATE, {}).items():
        own[AGENT_STATE][name] = x.movedim(_axis(name), 0)[rows].movedim(0, _axis(name)).contiguous()
    for name, x in groups.get(WRAPPERS, {}).items():
        own[WRAPPERS][name] = x[rows] if _per_env(name) else x
    episodes = {
        name: x for name, x in groups.get(EPISODES, {}).items() if rows.start <= _env_number(name) < rows.stop
    }
    document = _divided(environment, number * ranks.count, rows)
    return document, own | {EPISODES: _shifted(episodes, -rows.start)}


def _axis(name: str) -> int:
    """Return the axis of environments in a tensor of the agent's state (hidden states have layers first)."""
    return 1 if name.endswith(".hidden") else 0


def _per_env(name: str) -> bool:
    return name.rpartition(".")[2] in PER_ENVIRONMENT


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


def _joined_episodes(parts: Sequence[dict[str, Any]], number: int) -> dict[str, Any]:
    """Join documents of `rlxf.envs.resume.episode_state`; if impossible, return only the reason as "lost"."""
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        if LOST in part:
            return part
    try:
        joined: dict[str, Any] = _joined(parts, number)
    except EpisodeLostError as error:
        return {LOST: str(error)}
    return joined


def _joined(values: Sequence[Any], number: int) -> Any:
    """Join states of ``number`` environments each: lists of that length are concatenated.

    Raises:
        EpisodeLostError: if other values differ.
    """
    first = values[0]
    if isinstance(first, dict):
        return {key: _joined([value[key] for value in values], number) for key in first}
    if isinstance(first, list) and all(len(value) == number for value in values):
        return [row for value in values for row in value]
    if any(value != first for value in values):
        raise EpisodeLostError(
            "the states of environments of several processes differ and are not lists with a row for each "
            "environment"
        )
    return first


def _divided(value: Any, number: int, rows: slice) -> Any:
    if isinstance(value, dict):
        return {key: _divided(part, number, rows) for key, part in value.items()}
    return value[rows] if isinstance(value, list) and len(value) == number else value
