"""Environments that fail according to a plan, and helper functions of the tests of worker processes."""

import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs import ActionReplay, Workers, WorkerVecEnv
from rlxf.envs.infos import LOST

VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
QUICK = {"timeout": 2.0, "start_timeout": 3.0, "back_off": 0.02}
IMPATIENT = {"timeout": 0.5, "start_timeout": 1.0}
"""Timeouts for environments that hang."""
THIRD = 3
OBSERVATION_SPACES = {
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
    """Environment with random observations, rewards and ends, determined by the seed."""

    mood = "good"

    def __init__(self, observation_space: spaces.Space = VECTOR):
        self.observation_space, self.action_space = observation_space, spaces.Discrete(3)
        self.sampler = deepcopy(observation_space)  # a copy, so other code does not advance its generator

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.sampler.seed(int(self.np_random.integers(2**31)))
        return self.sampler.sample(), {}

    def step(self, action: Any) -> Any:
        end = self.np_random.random()
        reward = float(self.np_random.normal() + action)
        return self.sampler.sample(), reward, end < 0.05, end > 0.95, {}


class Breaking(gymnasium.Wrapper):
    """Wrapper that fails according to a plan, such as ("step raises", "init dies"), one failure at a time.

    A step fails from the third one after the creation. A reset fails after an episode or after a failure. A
    query is a read of the attribute ``mood``.

    Args:
        env: the environment.
        plan: place (init, reset, step, ask) and way (`WAYS`) of each failure.
        marks: folder with a file for each failure, which persists when the process ends.
    """

    def __init__(self, env: gymnasium.Env, plan: Sequence[str], marks: Path):
        super().__init__(env)
        self.plan, self.marks, self.steps, self.resets = plan, marks, 0, 0
        self._fail_at("init")

    def reset(self, **keywords: Any) -> Any:
        self.resets += 1
        if self.resets > 1 or any(self.marks.iterdir()):
            self._fail_at("reset")
        return self.env.reset(**keywords)

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps >= THIRD:
            self._fail_at("step")
        return self.env.step(action)

    @property
    def mood(self) -> str:
        self._fail_at("ask")
        return "good"

    def _fail_at(self, place: str) -> None:
        number = len(list(self.marks.iterdir()))
        if number < len(self.plan) and self.plan[number].startswith(place):
            (self.marks / str(number)).touch()
            WAYS[self.plan[number].split()[1]]()


def made(plan: Sequence[str] = (), marks: Path = Path(), space: spaces.Space = VECTOR) -> gymnasium.Env:
    """Create an environment with the wrappers of `rlxf.envs.make_vec_env`."""
    return ActionReplay(Monitor(Breaking(Seeded(space), plan, marks) if plan else Seeded(space)))


def breaking(marks: Path, *plan: str, n_envs: int = 3, number: int = 3, **options: Any) -> WorkerVecEnv:
    """Create environments in ``number`` processes; environment 1 fails according to the plan."""
    makes = [partial(made, plan if i == 1 else (), marks) for i in range(n_envs)]
    env = WorkerVecEnv(makes, Workers(number, **QUICK | options))
    env.seed(0)
    return env


class Global(Seeded):
    """Environment whose observations are drawn from the global generators of the process."""

    def reset(self, **keywords: Any) -> Any:
        super().reset(**keywords)
        drawn = [random.random(), np.random.random(), float(torch.rand(()))]  # noqa: NPY002
        return np.array(drawn, np.float32), {}


class Driven(Seeded):
    """Environment that starts a program and a fork, which sleep for a long time, and does not end them."""

    def __init__(self):
        super().__init__()
        fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
        fork.start()
        self.engines = [subprocess.Popen(["sleep", "1000"]).pid, fork.pid]


class Clinging(Seeded):
    """Environment whose ``close`` hangs."""

    def close(self) -> None:
        time.sleep(10**6)


class Marking(Seeded):
    """Environment whose ``close`` takes some time, creates a file, and raises."""

    def __init__(self, mark: Path):
        super().__init__()
        self.mark = mark

    def close(self) -> None:
        time.sleep(0.1)
        self.mark.touch()
        _raise()


class Parental(Seeded):
    """Environment with worker processes, one of which hangs at its third step; it has their process ids."""

    def __init__(self, marks: Path):
        super().__init__()
        self.crowd = breaking(marks, "step hangs", timeout=1000.0)
        self.crowd.reset()
        self.driven = WorkerVecEnv([Driven], Workers(1))
        workers = {*self.crowd.pool._workers_by_env.values(), *self.driven.pool._workers_by_env.values()}
        self.pids = [*self.driven.get_attr("engines")[0], *(worker._process.pid for worker in workers)]

    def step(self, action: Any) -> NoReturn:
        while True:
            self.crowd.step(np.zeros(3, np.int64))


class Hopeless(Seeded):
    """Environment that raises at each step."""

    def step(self, action: Any) -> Any:
        _raise()


LONGEST = 60.0
"""Timeout of a test in seconds."""


def played(env: VecEnv, steps: int, seed: int = 0) -> Iterator[Any]:
    """Yield the results of ``steps`` steps with random actions."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield env.step(rng.integers(0, 3, env.num_envs))


def until_back(env: VecEnv, i: int) -> list[Any]:
    """Return the steps up to the first one of environment i after its failure and restart."""
    failed, rows = False, []
    deadline = time.monotonic() + LONGEST
    for observations, rewards, dones, infos in played(env, 10**6):
        rows.append((observations, rewards, dones, infos))
        if failed and LOST not in infos[i]:
            return rows
        failed |= LOST in infos[i]
        assert time.monotonic() < deadline
    return rows


def wait_until(condition: Any, *arguments: Any) -> None:
    """Poll the condition until it is true, for at most a minute."""
    deadline = time.monotonic() + LONGEST
    while not condition(*arguments):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Return whether the process does not exist or is a zombie."""
    try:
        return _state(pid) == "Z"
    except FileNotFoundError:
        return True


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP has taken effect."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
