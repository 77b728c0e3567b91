"""Helper functions of the tests of worker processes."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from rlxf.envs.batches import LOST

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
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
