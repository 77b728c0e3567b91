"""Time of acting steps, early and late in an episode."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np

from rlxf.agents.gtrxl import GTrXLPPO

CALLS = 300


def acting_milliseconds(agent: GTrXLPPO, envs: int, steps: Sequence[int]) -> dict[int, float]:
    """Return median milliseconds of ``agent.predict`` for ``envs`` environments, by step of an episode.

    The agent acts from the start of the episode. At each of ``steps``, the same call is repeated; it does not
    change the state.
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
    """Return the wall time of a call, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def processor_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of a call, in seconds."""
    start = time.process_time()
    call()
    return time.process_time() - start
