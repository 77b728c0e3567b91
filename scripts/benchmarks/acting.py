"""What one acting step costs, early and late in an episode."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np

from rlxf.agents.gtrxl import GTrXLPPO

CALLS = 300


def acting_milliseconds(agent: GTrXLPPO, envs: int, steps: Sequence[int]) -> dict[int, float]:
    """Median milliseconds of ``agent.predict`` for ``envs`` environments at each of ``steps`` of an episode.

    The episode is walked through step by step. At each of ``steps`` the same call is made many times: its
    state goes in and stays as it was.
    """
    space = agent.observation_space
    obs = np.zeros((envs, *space.shape), space.dtype)  # type: ignore[misc]
    state, costs = None, {}
    for step in range(max(steps) + 1):
        if step in steps:
            costs[step] = 1000 * median(seconds(partial(agent.predict, obs, state)) for _ in range(CALLS))
        _, state = agent.predict(obs, state)
    return costs


def seconds(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def processor_seconds(call: Callable[[], object]) -> float:
    """Seconds of the processor that a call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start
