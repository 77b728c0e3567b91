"""Episode statistics of all processes, for the logged means."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rlxf.training import Archive
from rlxf.training.ranks import Ranks

NUMBERS = ("r", "l", "t")
"""Keys of SB3's ``Monitor`` in the info of an episode's last step: return, length and seconds."""


class Ended:
    """Statistics of episodes that ended since the last exchange between processes, by step."""

    def __init__(self) -> None:
        self._steps: list[list[dict[str, Any]]] = []

    def note(self, infos: list[dict[str, Any]], dones: np.ndarray) -> None:
        """Record the episodes that ended in a step of this process's environments."""
        self._steps.append([_statistics(infos[row]) for row in np.flatnonzero(dones)])

    def tell(self, ranks: Ranks, note: Callable[[list[dict[str, Any]], np.ndarray], None]) -> None:
        """Exchange the recorded episodes, pass those of all processes to ``note`` by step, and clear them.

        The order is that of a single process with all environments.

        Args:
            ranks: the process group.
            note: is called with the infos of each step and an array of True.
        """
        archives = ranks.gathered_archives(Archive({"steps": self._steps}, {}))
        self._steps = []
        for step in zip(*(each.documents["steps"] for each in archives), strict=True):
            infos = [info for part in step for info in part]
            note(infos, np.ones(len(infos), np.bool_))


def _statistics(info: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of an info that SB3 averages for its log."""
    statistics: dict[str, Any] = {}
    if "episode" in info:
        statistics["episode"] = {name: float(info["episode"][name]) for name in NUMBERS}
    if "is_success" in info:
        statistics["is_success"] = float(info["is_success"])
    return statistics
