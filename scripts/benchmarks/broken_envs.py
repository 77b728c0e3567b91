"""One environment raises, is killed or hangs, again and again: what is lost, how fast is the rest.

One that raises or is killed costs the others nothing but the processor that its restart takes. For one that
hangs all wait, each time for ``Workers.timeout`` seconds: that alone bounds what it costs. Where it hangs
every so many seconds, the others keep a share of 1 - timeout / every. The timeout is to be some times the
slowest step of an environment that is well, resets included.
"""

import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import gymnasium
from rich.table import Table
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor

from rlxf import GTrXLPPO
from rlxf.envs.infos import LOST
from rlxf.envs.replayable import Replayable
from rlxf.envs.workers import Workers, WorkerVecEnv

TASK = "CartPole-v1"
BROKEN = 1
"""The environment that breaks."""


def _raise() -> NoReturn:
    raise RuntimeError("on purpose")


WAYS: dict[str, Callable[[], Any]] = {
    "raises": _raise,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(10**6),
}
NONE = "nothing breaks"
LEAST_SHARE = 0.8
"""Of their rate, that the others have to keep."""


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
        self.seconds, self.steps, self.lost, self.started, self.lasted = seconds, 0, 0, 0.0, 0.0

    def _on_rollout_end(self) -> None:
        self.started = self.started or time.monotonic()

    def _on_step(self) -> bool:
        infos = self.locals["infos"]
        self.lost += sum(LOST in info for info in infos)
        if not self.started:
            return True
        self.steps += sum(LOST not in info for i, info in enumerate(infos) if i != BROKEN)
        self.lasted = time.monotonic() - self.started
        return self.lasted < self.seconds


@dataclass(frozen=True)
class Broken:
    """A training in which one environment broke.

    Args:
        steps_per_second: of all other environments, rollouts and updates together.
        restarts: of the one that broke.
        lost_steps: of the same, in back-off and restart.
        told: steps that were told to be lost as they came; each of them has to be counted.
        share: of the rate where nothing breaks.
    """

    steps_per_second: float
    restarts: int
    lost_steps: int
    told: int
    share: float = 1.0

    def missed(self) -> list[str]:
        """What should not have come of it."""
        missed = {
            f"{self.lost_steps} steps were counted as lost, {self.told} were": self.lost_steps != self.told,
            f"the others kept {self.share:.0%} of their rate": self.share < LEAST_SHARE,
        }
        return [told for told, there in missed.items() if there]


@dataclass(frozen=True)
class BrokenEnvs:
    """A GTrXLPPO learns in environments of which one breaks every so many seconds, in each of three ways."""

    n_envs: int = 16
    """Environments; number 1 breaks."""
    workers: int = 16
    """Processes that they run in."""
    n_steps: int = 256
    """Steps of a rollout in each environment, a multiple of 64."""
    seconds: float = 20.0
    """Of each training, behind its first rollout."""
    every: float = 8.0
    """Seconds from a start of the environment to its break."""
    timeout: float = 1.0
    """Seconds in which it has to answer: what each time that it hangs costs the others."""

    def found(self) -> dict[str, Broken]:
        """What came of each way; rates are to the mean of a training before and one behind all."""
        first, *broken, last = (self.trained(way) for way in (NONE, *WAYS, NONE))
        usual = (first.steps_per_second + last.steps_per_second) / 2
        shares = [replace(each, share=each.steps_per_second / usual) for each in broken]
        return {NONE: replace(first, steps_per_second=usual)} | dict(zip(WAYS, shares, strict=True))

    def trained(self, way: str) -> Broken:
        """What came of one training; the share is not known yet."""
        makes = [partial(made, way if i == BROKEN else NONE, self.every) for i in range(self.n_envs)]
        workers = Workers(self.workers, timeout=self.timeout, restarts=1000)
        clock = Clock(self.seconds)
        with warnings.catch_warnings(action="ignore"), closing(WorkerVecEnv(makes, workers)) as env:
            GTrXLPPO("MlpGTrXLPolicy", env, n_steps=self.n_steps, seed=0).learn(10**9, clock)
            return Broken(clock.steps / clock.lasted, env.restarts, env.lost_steps, clock.lost)


def made(way: str, after: float) -> gymnasium.Env:
    """One environment."""
    env = gymnasium.make(TASK)
    return Replayable(Monitor(env if way == NONE else Breaking(env, way, after)))


def as_table(found: dict[str, Broken]) -> Table:
    """The same for people."""
    title = "One environment breaks again and again"
    table = Table("way", "steps/s of the others", "share", "restarts", "steps lost", title=title)
    for way, each in found.items():
        numbers = (
            f"{each.steps_per_second:.0f}",
            f"{each.share:.0%}",
            str(each.restarts),
            str(each.lost_steps),
        )
        table.add_row(way, *numbers)
    return table
