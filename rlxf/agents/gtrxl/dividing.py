"""What a file keeps of the environments of all processes, and what of it is one's own.

A file is the same whoever wrote it: environments stand in it in a row, as those of one process. So as many
processes as divide their number can go on from it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlxf.envs.errors import EpisodeLostError
from rlxf.training import Archive
from rlxf.training.ranks import Ranks

ENVIRONMENT, STAND, WRAPPERS, EPISODES = "environment", "stand", "wrappers", "episodes"
LOST = "lost"
OF_ENVIRONMENTS = {"returns", "episode_returns", "episode_lengths", "stacked_obs"}
"""What wrappers carry for each environment by itself; the rest they carry once for all."""

Groups = dict[str, dict[str, Tensor]]


def gathered(ranks: Ranks, environment: dict[str, Any], groups: Groups) -> tuple[dict[str, Any], Groups]:
    """Put together what all processes have, in the order of their environments.

    Args:
        ranks: the processes.
        environment: the document of this one's episodes, which `rlxf.envs.resuming` made.
        groups: tensors of where it stands, of its wrappers and of its episodes.

    Returns:
        The same of all environments.
    """
    found = ranks.gathered_archives(Archive({ENVIRONMENT: environment}, groups))
    parts = [each.documents[ENVIRONMENT] for each in found]
    joined: Groups = {STAND: {}, WRAPPERS: {}, EPISODES: {}}
    for name in groups[STAND]:
        joined[STAND][name] = torch.cat([each.tensors[STAND][name] for each in found], dim=_axis(name))
    for name, own in groups[WRAPPERS].items():
        whole = torch.cat([each.tensors[WRAPPERS][name] for each in found]) if _many(name) else own
        joined[WRAPPERS][name] = whole
    number = len(groups[STAND]["position"])
    for rank, each in enumerate(found):
        joined[EPISODES] |= _counted(each.tensors[EPISODES], rank * number)
    return _joined_episodes(parts, number), joined


def divided(
    ranks: Ranks, number: int, environment: dict[str, Any], groups: Mapping[str, Mapping[str, Tensor]]
) -> tuple[dict[str, Any], Groups]:
    """This process's part of what `gathered` gave.

    Args:
        ranks: the processes, as many as divide the environments of the file.
        number: environments that each of them has.
        environment: the document of all episodes.
        groups: tensors of all environments.
    """
    rows = ranks.rows(number)
    own: Groups = {STAND: {}, WRAPPERS: {}}
    for name, x in groups.get(STAND, {}).items():
        own[STAND][name] = x.movedim(_axis(name), 0)[rows].movedim(0, _axis(name)).contiguous()
    for name, x in groups.get(WRAPPERS, {}).items():
        own[WRAPPERS][name] = x[rows] if _many(name) else x
    mine = {name: x for name, x in groups.get(EPISODES, {}).items() if rows.start <= _of(name) < rows.stop}
    return _divided(environment, number * ranks.count, rows), own | {EPISODES: _counted(mine, -rows.start)}


def _axis(name: str) -> int:
    """That of environments in a tensor of where an agent stands; layers come before it."""
    return 1 if name.endswith(".hidden") else 0


def _many(name: str) -> bool:
    return name.rpartition(".")[2] in OF_ENVIRONMENTS


def _of(name: str) -> int:
    """The environment of an array that `rlxf.envs.resuming.episodes_of` named."""
    return int(name.split(".")[1])


def _counted(tensors: Mapping[str, Tensor], behind: int) -> dict[str, Tensor]:
    """The same by names that count environments from ``behind`` on."""
    named = {}
    for name, x in tensors.items():
        kind, i, *part = name.split(".", 2)
        named[".".join([kind, str(int(i) + behind), *part])] = x
    return named


def _joined_episodes(parts: Sequence[dict[str, Any]], number: int) -> dict[str, Any]:
    """Documents of `rlxf.envs.resuming.episodes_of` as one; "lost" if they cannot be put together."""
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
    """States of ``number`` environments each as that of all: lists of as many rows one behind the other.

    Raises:
        EpisodeLostError: if something else differs.
    """
    first = values[0]
    if isinstance(first, dict):
        return {key: _joined([value[key] for value in values], number) for key in first}
    if isinstance(first, list) and all(len(value) == number for value in values):
        return [row for value in values for row in value]
    if any(value != first for value in values):
        raise EpisodeLostError("the states of environments of several processes are not lists of as many")
    return first


def _divided(value: Any, number: int, rows: slice) -> Any:
    if isinstance(value, dict):
        return {key: _divided(part, number, rows) for key, part in value.items()}
    return value[rows] if isinstance(value, list) and len(value) == number else value
