"""Throughput and lost steps of training while one environment repeatedly raises, is killed or hangs.

An environment that raises or is killed costs the others only the CPU time of its restart. If an environment
hangs, all others wait for ``Workers.timeout`` seconds. If it hangs after each ``every`` seconds, the others
keep a share of 1 - timeout / every of their throughput. The timeout should be several times the slowest step
of a working environment, including resets.
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
from rlxf.envs.action_replay import ActionReplay
from rlxf.envs.infos import LOST
from rlxf.envs.worker_pool import Workers
from rlxf.envs.worker_vec_env import WorkerVecEnv

TASK = "CartPole-v1"
BROKEN = 1
"""Index of the failing environment."""


def _raise() -> NoReturn:
    raise RuntimeError("on purpose")


WAYS: dict[str, Callable[[], Any]] = {
    "raises": _raise,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(10**6),
}
NONE = "nothing breaks"
MIN_FRACTION = 0.8
"""Minimum share of throughput that the other environments must keep."""


class Breaking(gymnasium.Wrapper):
    """Wrapper that fails at its first step ``after`` seconds after its construction."""

    def __init__(self, env: gymnasium.Env, way: str, after: float):
        super().__init__(env)
        self.way, self.due = way, time.monotonic() + after

    def step(self, action: Any) -> Any:
        """Step, or fail if the time has passed."""
        if time.monotonic() > self.due:
            WAYS[self.way]()
        return super().step(action)


class Clock(BaseCallback):
    """Callback that counts steps of the other environments after the first rollout, and stops training."""

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
    """Result of a training run with one failing environment.

    Args:
        steps_per_second: throughput of all other environments, over rollouts and updates.
        restarts: restarts of the failing environment.
        lost_steps: steps of the failing environment that were lost in back-off and restart.
        reported_lost: steps that ``infos`` reported as lost; it must equal ``lost_steps``.
        share: throughput relative to training without failures.
    """

    steps_per_second: float
    restarts: int
    lost_steps: int
    reported_lost: int
    share: float = 1.0

    def missed(self) -> list[str]:
        """Return the violated expectations."""
        failures = {
            f"{self.lost_steps} lost steps, {self.reported_lost} of them reported": self.lost_steps
            != self.reported_lost,
            f"the other environments kept {self.share:.0%} of their throughput": self.share < MIN_FRACTION,
        }
        return [message for message, failed in failures.items() if failed]


@dataclass(frozen=True)
class BrokenEnvs:
    """Train GTrXLPPO while one environment fails periodically, in each of three ways."""

    n_envs: int = 16
    """Number of environments; the one with index 1 fails."""
    workers: int = 16
    """Worker processes of the environments."""
    n_steps: int = 256
    """Steps of a rollout per environment, a multiple of 64."""
    seconds: float = 20.0
    """Seconds of each training run, after its first rollout."""
    every: float = 8.0
    """Seconds from the start of the environment to its failure."""
    timeout: float = 1.0
    """Timeout of an environment in seconds; each hang costs the others this time."""

    def found(self) -> dict[str, Broken]:
        """Return the result of each failure mode; shares are relative to runs without failures."""
        first, *broken, last = (self.trained(way) for way in (NONE, *WAYS, NONE))
        baseline = (first.steps_per_second + last.steps_per_second) / 2
        shares = [replace(each, share=each.steps_per_second / baseline) for each in broken]
        return {NONE: replace(first, steps_per_second=baseline)} | dict(zip(WAYS, shares, strict=True))

    def trained(self, way: str) -> Broken:
        """Train with one failure mode; the share is not computed yet."""
        makes = [partial(made, way if i == BROKEN else NONE, self.every) for i in range(self.n_envs)]
        workers = Workers(self.workers, timeout=self.timeout, max_restarts=1000)
        clock = Clock(self.seconds)
        with warnings.catch_warnings(action="ignore"), closing(WorkerVecEnv(makes, workers)) as env:
            GTrXLPPO("MlpGTrXLPolicy", env, n_steps=self.n_steps, seed=0).learn(10**9, clock)
            return Broken(clock.steps / clock.lasted, env.restarts, env.lost_steps, clock.lost)


def made(way: str, after: float) -> gymnasium.Env:
    """Create one environment."""
    env = gymnasium.make(TASK)
    return ActionReplay(Monitor(env if way == NONE else Breaking(env, way, after)))


def as_table(results: dict[str, Broken]) -> Table:
    """Return the results as a table."""
    title = "One environment fails repeatedly"
    table = Table("failure", "steps/s of the others", "share", "restarts", "lost steps", title=title)
    for way, each in results.items():
        numbers = (
            f"{each.steps_per_second:.0f}",
            f"{each.share:.0%}",
            str(each.restarts),
            str(each.lost_steps),
        )
        table.add_row(way, *numbers)
    return table
