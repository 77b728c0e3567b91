"""Time of acting steps, early and late in an episode."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from rlxf.agents.gtrxl import GTrXLPPO

CALLS = 300
TASK = "rlxf/TMaze-v0"


@dataclass
class Acting:
    """Time of acting steps with and without compilation, with the default core: 2 layers of 64, memory 128.

    A step of a rollout chooses actions and values without the environment; ``predict`` also copies its state.
    Rounds with and without compilation alternate. Times are CPU times with one thread: the lowest median of a
    round. The elapsed time of the compilation
    is that of the first step.
    """

    envs: tuple[int, ...] = (1, 32)
    """Numbers of environments that act at once."""
    rounds: int = 10
    """Rounds of each kind."""
    calls: int = 100
    """Calls of each round."""

    def run(self) -> None:
        """Measure and print the table."""
        torch.set_num_threads(1)
        columns = ("environments", "call", "eager, ms", "compiled, ms", "ratio", "compiled in, s")
        table = Table(*columns, title="Acting step, 2 layers of 64, memory 128")
        for envs in self.envs:
            compilation, costs = self.measure(envs)
            for call, (eager, compiled) in costs.items():
                numbers = f"{eager:.2f}", f"{compiled:.2f}", f"{eager / compiled:.1f}"
                table.add_row(str(envs), call, *numbers, f"{compilation:.0f}")
        Console().print(table)

    def measure(self, envs: int) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return the seconds of the compilation, and the milliseconds of each call, eager and compiled."""
        agents = [
            GTrXLPPO("MlpPolicy", TASK, n_envs=envs, seed=0, device="cpu", compile=compile)
            for compile in (False, True)
        ]
        calls = [acting_calls(agent) for agent in agents]
        compilation = seconds(calls[1]["predict"])
        return compilation, {name: self._compare([each[name] for each in calls]) for name in calls[0]}

    def _compare(self, calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
        """Return the milliseconds of two calls, measured in turn."""
        rounds = [[self._round(call) for call in calls] for _ in range(self.rounds)]
        eager, compiled = (1000 * min(times) for times in zip(*rounds, strict=True))
        return eager, compiled

    def _round(self, call: Callable[[], object]) -> float:
        return median(processor_seconds(call) for _ in range(self.calls))


def acting_calls(agent: GTrXLPPO) -> dict[str, Callable[[], object]]:
    """Return a call of ``predict`` and one of a rollout step."""
    assert agent.env is not None
    agent._setup_learn(10**9)
    agent.policy.set_training_mode(False)
    obs: Any = agent.env.reset()
    return {
        "predict": partial(agent.predict, obs, agent.collector.state, deterministic=True),
        "step of a rollout": partial(agent.collector.act, lambda _obs, _index, choice: choice.get_actions()),
    }


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
