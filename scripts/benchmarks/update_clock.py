"""Timing of the updates of an agent."""

import time
from collections.abc import Callable
from itertools import pairwise

from stable_baselines3.common.callbacks import BaseCallback


class UpdateClock(BaseCallback):
    """Callback that records the end of each update.

    Args:
        now: clock in seconds; ``time.process_time`` measures CPU time.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        super().__init__()
        self.now = now
        self.times: list[float] = []

    @property
    def durations(self) -> list[float]:
        """Seconds of each update."""
        return [after - before for before, after in pairwise(self.times)]

    def _on_training_start(self) -> None:
        self.times.append(self.now())

    def _on_step(self) -> bool:
        self.times.append(self.now())
        return True
