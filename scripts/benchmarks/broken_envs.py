"""One environment raises, is killed or hangs, again and again: what is lost, how fast is the rest."""

import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import gymnasium
import tyro
from rich.console import Console
from rich.table import Table
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor

from rlxf import GTrXLPPO
from rlxf.envs.infos import LOST
from rlxf.envs.replayable import Replayable
from rlxf.envs.workers import Workers, WorkerVecEnv

TASK = "CartPole-v1"
BROKEN = 7
"""The environment that breaks."""


def _raise() -> NoReturn:
    raise RuntimeError("on purpose")


WAYS: dict[str, Callable[[], Any]] = {
    "raises": _raise,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(10**6),
}
NONE = "nothing breaks"


class Breaking(gymnasium.Wrapper):
    """Breaks at its first step so many seconds after it was made."""

    def __init__(self, env: gymnasium.Env, way: str, after: float):
        super().__init__(env)
        self.way, self.due = way, time.monotonic() + after

    def step(self, action: Any) -> Any:
        """Step, or break."""
        if time.monotonic() > self.due:
            WAYS[self.way]()
        return super().step(action)


class Clock(BaseCallback):
    """Counts the steps that the others play, from the end of the first rollout on, and ends the training."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.steps, self.started, self.lasted = seconds, 0, 0.0, 0.0

    def _on_rollout_end(self) -> None:
        self.started = self.started or time.monotonic()

    def _on_step(self) -> bool:
        if not self.started:
            return True
        self.steps += sum(LOST not in info for i, info in enumerate(self.locals["infos"]) if i != BROKEN)
        self.lasted = time.monotonic() - self.started
        return self.lasted < self.seconds


@dataclass(frozen=True)
class Broken:
    """A training in which one environment broke.

    Args:
        way: how.
        steps_per_second: of all other environments, rollouts and updates together.
        share: of the rate where nothing breaks.
        restarts: of the one that broke.
        lost_steps: of the same, in back-off and restart.
        steps: of all other environments.
    """

    way: str
    steps_per_second: float
    share: float
    restarts: int
    lost_steps: int
    steps: int


@dataclass
class BrokenEnvs:
    """A GTrXLPPO learns in environments of which one breaks every so many seconds, in each of three ways."""

    n_envs: int = 16
    """Environments; number 7 breaks."""
    workers: int = 16
    """Processes that they run in."""
    seconds: float = 20.0
    """Of each training, behind its first rollout."""
    every: float = 8.0
    """Seconds from a start of the environment to its break."""
    timeout: float = 1.0
    """Seconds in which it has to answer."""
    output: Path = Path("runs/bench-broken-envs.json")
    """Where to write all numbers."""

    def run(self) -> None:
        """Print a table, and write it."""
        rows = self.rows()
        Console().print(as_table(rows))
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")

    def rows(self) -> list[Broken]:
        """What came of each way; the rates are to the mean of a training before and one behind all."""
        found = [self._trained(way) for way in (NONE, *WAYS, NONE)]
        usual = (found[0].steps_per_second + found[-1].steps_per_second) / 2
        return [replace(row, share=row.steps_per_second / usual) for row in found]

    def _trained(self, way: str) -> Broken:
        makes = [partial(made, way if i == BROKEN else NONE, self.every) for i in range(self.n_envs)]
        workers = Workers(self.workers, timeout=self.timeout, restarts=1000)
        clock = Clock(self.seconds)
        with warnings.catch_warnings(action="ignore"), closing(WorkerVecEnv(makes, workers)) as env:
            GTrXLPPO("MlpGTrXLPolicy", env, seed=0).learn(10**9, clock)
            return Broken(way, clock.steps / clock.lasted, 1.0, env.restarts, env.lost_steps, clock.steps)


def made(way: str, after: float) -> gymnasium.Env:
    """One environment."""
    env = gymnasium.make(TASK)
    return Replayable(Monitor(env if way == NONE else Breaking(env, way, after)))


def as_table(rows: list[Broken]) -> Table:
    """The same for people."""
    table = Table("environment 7 ...", "steps/s of the others", "share", "restarts", "steps lost")
    for row in rows:
        numbers = f"{row.steps_per_second:.0f}", f"{row.share:.0%}", str(row.restarts), str(row.lost_steps)
        table.add_row(row.way, *numbers)
    return table


if __name__ == "__main__":
    tyro.cli(BrokenEnvs).run()
