"""What ended in each of several processes, for the means that are logged."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rlxf.training import Archive
from rlxf.training.ranks import Ranks

NUMBERS = ("r", "l", "t")
"""Of an episode, in the info of its last step: return, length and seconds, as SB3's ``Monitor`` says."""


class Ended:
    """Episodes that ended since all processes were told of them, step by step."""

    def __init__(self) -> None:
        self._steps: list[list[dict[str, Any]]] = []

    def note(self, infos: list[dict[str, Any]], dones: np.ndarray) -> None:
        """Note what ended in a step of this one's environments."""
        self._steps.append([_told(infos[row]) for row in np.flatnonzero(dones)])

    def tell(self, ranks: Ranks, note: Callable[[list[dict[str, Any]], np.ndarray], None]) -> None:
        """Have all of them note the infos of each step, in the order of one process, and forget them."""
        found = ranks.gathered_archives(Archive({"steps": self._steps}, {}))
        self._steps = []
        for step in zip(*(each.documents["steps"] for each in found), strict=True):
            infos = [info for part in step for info in part]
            note(infos, np.ones(len(infos), np.bool_))


def _told(info: dict[str, Any]) -> dict[str, Any]:
    """The part of an info that SB3 makes means of."""
    told: dict[str, Any] = {}
    if "episode" in info:
        told["episode"] = {name: float(info["episode"][name]) for name in NUMBERS}
    if "is_success" in info:
        told["is_success"] = float(info["is_success"])
    return told
