"""Environments that break where a test says, each time in another process."""

import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor

from rlxf.envs import Replayable, Workers, WorkerVecEnv

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
QUICK = {"timeout": 2.0, "start_timeout": 3.0, "back_off": 0.02}
IMPATIENT = {"timeout": 0.5, "start_timeout": 1.0}
"""For what hangs."""
THIRD = 3
SHOWN = {
    "vector": VECTOR,
    "image": spaces.Box(0, 255, (8, 8, 1), np.uint8),
    "dict": spaces.Dict({"number": spaces.Discrete(4), "vector": VECTOR}),
    "tuple": spaces.Tuple([spaces.Discrete(4), VECTOR]),
}


def _raise() -> NoReturn:
    raise ValueError("the simulator lost its mind")


WAYS = {
    "raises": _raise,
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(3),
    "hangs": lambda: time.sleep(10**6),
}


class Seeded(gymnasium.Env):
    """Observations, rewards and ends by chance: a seed says all of it."""

    mood = "good"

    def __init__(self, observation_space: spaces.Space = VECTOR):
        self.observation_space, self.action_space = observation_space, spaces.Discrete(3)
        self.seen = deepcopy(observation_space)  # sampled by nobody else

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.seen.seed(int(self.np_random.integers(2**31)))
        return self.seen.sample(), {}

    def step(self, action: Any) -> Any:
        end = self.np_random.random()
        reward = float(self.np_random.normal() + action)
        return self.seen.sample(), reward, end < 0.05, end > 0.95, {}


class Breaking(gymnasium.Wrapper):
    """Breaks by a plan, such as ("step raises", "init dies"): one after the other, whoever plays.

    A step is the third one since it was made; a reset is one behind an episode, or behind a break; it is
    asked for its mood.

    Args:
        env: the environment.
        plan: place (init, reset, step, ask) and way (`WAYS`) of each break.
        marks: folder for a mark of each break, which outlasts the process.
    """

    def __init__(self, env: gymnasium.Env, plan: Sequence[str], marks: Path):
        super().__init__(env)
        self.plan, self.marks, self.steps, self.resets = plan, marks, 0, 0
        self._meet("init")

    def reset(self, **asked: Any) -> Any:
        self.resets += 1
        if self.resets > 1 or any(self.marks.iterdir()):
            self._meet("reset")
        return self.env.reset(**asked)

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps >= THIRD:
            self._meet("step")
        return self.env.step(action)

    @property
    def mood(self) -> str:
        self._meet("ask")
        return "good"

    def _meet(self, place: str) -> None:
        number = len(list(self.marks.iterdir()))
        if number < len(self.plan) and self.plan[number].startswith(place):
            (self.marks / str(number)).touch()
            WAYS[self.plan[number].split()[1]]()


def made(plan: Sequence[str] = (), marks: Path = Path(), space: spaces.Space = VECTOR) -> gymnasium.Env:
    """As `rlxf.envs.make_vec_env` wraps environments."""
    return Replayable(Monitor(Breaking(Seeded(space), plan, marks) if plan else Seeded(space)))


def breaking(marks: Path, *plan: str, n_envs: int = 3, number: int = 3, **options: Any) -> WorkerVecEnv:
    """Environments in so many processes, of which number 1 breaks by the plan."""
    makes = [partial(made, plan if i == 1 else (), marks) for i in range(n_envs)]
    env = WorkerVecEnv(makes, Workers(number, **QUICK | options))
    env.seed(0)
    return env


class Global(Seeded):
    """Shows what it draws from the generators of the process."""

    def reset(self, **asked: Any) -> Any:
        super().reset(**asked)
        drawn = [random.random(), np.random.random(), float(torch.rand(()))]  # noqa: NPY002
        return np.array(drawn, np.float32), {}


class Driven(Seeded):
    """Has a program and a fork of its own, which both do nothing for a long time, and does not end them."""

    def __init__(self):
        super().__init__()
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
        fork.start()
        self.engines = [subprocess.Popen(["sleep", "1000"]).pid, fork.pid]


class Clinging(Seeded):
    """Takes for ever to close."""

    def close(self) -> None:
        time.sleep(10**6)


class Marking(Seeded):
    """Takes its time to close, leaves a mark then, and raises."""

    def __init__(self, mark: Path):
        super().__init__()
        self.mark = mark

    def close(self) -> None:
        time.sleep(0.1)
        self.mark.touch()
        _raise()


class Parental(Seeded):
    """Has environments in processes of its own, one of which hangs at its third step, and tells of all."""

    def __init__(self, marks: Path):
        super().__init__()
        self.crowd = breaking(marks, "step hangs", timeout=1000.0)
        self.crowd.reset()
        self.driven = WorkerVecEnv([Driven], Workers(1))
        workers = {*self.crowd.crew._at.values(), *self.driven.crew._at.values()}
        self.pids = [*self.driven.get_attr("engines")[0], *(worker._process.pid for worker in workers)]

    def step(self, action: Any) -> NoReturn:
        while True:
            self.crowd.step(np.zeros(3, np.int64))


class Hopeless(Seeded):
    """Raises at its first step, whoever plays."""

    def step(self, action: Any) -> Any:
        _raise()
