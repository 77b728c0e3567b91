"""What the tests of environments in processes play with them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.infos import LOST

LONGEST = 60.0
"""Seconds after which a test gives up."""


def played(env: VecEnv, steps: int, seed: int = 0) -> Iterator[Any]:
    """Each step of ``env``, with random actions."""
    draws = np.random.default_rng(seed)
    for _ in range(steps):
        yield env.step(draws.integers(0, 3, env.num_envs))


def until_back(env: VecEnv, i: int) -> list[Any]:
    """The steps up to the first one that environment i plays again after it broke."""
    broken, rows = False, []
    deadline = time.monotonic() + LONGEST
    for observations, rewards, dones, infos in played(env, 10**6):
        rows.append((observations, rewards, dones, infos))
        if broken and LOST not in infos[i]:
            return rows
        broken |= LOST in infos[i]
        assert time.monotonic() < deadline
    return rows


def wait_until(condition: Any, *arguments: Any) -> None:
    """Look again and again, up to a minute."""
    deadline = time.monotonic() + LONGEST
    while not condition(*arguments):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or only what is left of a dead one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
