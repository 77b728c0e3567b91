"""Statistics of finished episodes: their exchange between processes, and their storage in files."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlxf.envs.infos import is_episode, success_of
from rlxf.training import Archive
from rlxf.training.process_group import ProcessGroup

NUMBERS = ("r", "l", "t")
"""Keys of SB3's ``Monitor`` in the info of an episode's last step: return, length and seconds."""


class EpisodeStatistics:
    """Statistics of episodes that ended since the last exchange between processes, by step."""

    def __init__(self) -> None:
        self._steps: list[list[dict[str, Any]]] = []

    def record(self, infos: list[dict[str, Any]], dones: np.ndarray) -> None:
        """Record the episodes that ended in a step of this process's environments."""
        self._steps.append([_episode_info_json(infos[row]) for row in np.flatnonzero(dones)])

    def exchange(
        self, ranks: ProcessGroup, record: Callable[[list[dict[str, Any]], np.ndarray], None]
    ) -> None:
        """Exchange the recorded episodes, pass those of all processes to ``record`` by step, and clear them.

        The order is that of a single process with all environments.

        Args:
            ranks: the process group.
            record: is called with the infos of each step and an array of True.
        """
        archives = ranks.gather_archives(Archive({"steps": self._steps}, {}))
        self._steps = []
        for step in zip(*(each.documents["steps"] for each in archives), strict=True):
            infos = [info for part in step for info in part]
            record(infos, np.ones(len(infos), np.bool_))


def episode_infos(infos: Sequence[Mapping[str, Any]], dones: np.ndarray) -> list[dict[str, Any]]:
    """Return the `episode_info` of environments (E,), without the success where ``dones`` is False.

    A wrapper may report an episode in a step that is not done. Environments may give ``is_success``, in any
    form, in each step.
    """
    return [
        episode_info(info) if done else _reported_episode(info) if "episode" in info else {}
        for info, done in zip(infos, dones.tolist(), strict=True)
    ]


def episode_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an info that SB3 averages for its log: the episode and its success as a number.

    An entry ``episode`` of another meaning, such as a number, is left out.

    Raises:
        FaultyEnvironmentError: if the success is not a number.
    """
    statistics = _reported_episode(info)
    if (success := success_of(info)) is not None:
        statistics["is_success"] = success
    return statistics


def _reported_episode(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry ``episode`` of an info, unless it has another meaning."""
    return {"episode": info["episode"]} if is_episode(info.get("episode")) else {}


def statistics_to_json(
    episodes: Iterable[Mapping[str, Any]] | None, successes: Iterable[float] | None
) -> dict[str, list[Any]]:
    """Return SB3's buffers of the last episodes as JSON data; None is an empty buffer.

    Args:
        episodes: infos of episodes, ``ep_info_buffer``.
        successes: 1 for success and 0 for failure, ``ep_success_buffer``.
    """
    return {
        "episodes": [_episode_numbers(each) for each in episodes or ()],
        "successes": [float(each) for each in successes or ()],
    }


def statistics_from_json(stored: Mapping[str, Any], size: int) -> tuple[deque[Any], deque[Any]]:
    """Return ``ep_info_buffer`` and ``ep_success_buffer``, of this size, from `statistics_to_json`."""
    return deque(stored["episodes"], maxlen=size), deque(stored["successes"], maxlen=size)


def unused_seed(seed: int, num_timesteps: int) -> int:
    """Return a seed for environments that are reset during a training, which no earlier episode had.

    Args:
        seed: seed of the agent.
        num_timesteps: number of steps so far.
    """
    return int(np.random.SeedSequence([seed, num_timesteps]).generate_state(1)[0])


def _episode_numbers(episode: Mapping[str, Any]) -> dict[str, float]:
    """Return the `NUMBERS` that the info of an episode has."""
    return {name: float(episode[name]) for name in NUMBERS if name in episode}


def _episode_info_json(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `episode_info` as JSON."""
    found = episode_info(info)
    return found | {"episode": _episode_numbers(found["episode"])} if "episode" in found else found
