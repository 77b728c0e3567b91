"""Time of acting steps, early and late in an episode."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import is_cuda, now, step_options
from rlxf.agents.gtrxl import GTrXLPPO

CALLS = 300
TASK = "rlxf/TMaze-v0"
ROOT = Path(__file__).resolve().parents[2]
PREDICT = f"""
import sys, time, torch
from statistics import median
from rlxf import GTrXLPPO

torch.set_num_threads(1)
envs, rounds, calls, compiled = map(int, sys.argv[1:])
options = {{"compile": True}} if compiled else {{}}  # earlier versions do not have the option
agent = GTrXLPPO("MlpPolicy", {TASK!r}, n_envs=envs, seed=0, device="cpu", **options)
obs, state, medians = agent.env.reset(), None, []
for call in range(rounds + 2):  # the first two rounds fill the memory
    times = []
    for _ in range(calls):
        start = time.process_time()
        _, state = agent.predict(obs, state, deterministic=True)
        times.append(time.process_time() - start)
    medians.append(median(times))
print(1000 * min(medians[2:]))
"""
"""Program that prints the milliseconds of ``predict`` of the version in the search path."""


@dataclass
class Acting:
    """Time of acting steps with and without compilation, with the default core: 2 layers of 64, memory 128.

    A step of a rollout chooses actions and values without the environment; ``predict`` also copies its state.
    Rounds with and without compilation alternate. Times are CPU times with one thread: the lowest median of a
    round. The elapsed time of the compilation is that of the first step. On a GPU, steps are captured instead
    of compiled, and times are elapsed times: the lowest mean of a round, at whose end the program waits for
    the GPU.

    With ``checkout``, processes of this version and of another one, such as an earlier commit, alternate, and
    ``predict`` is compared.
    """

    envs: tuple[int, ...] = (1, 32)
    """Numbers of environments that act at once."""
    rounds: int = 10
    """Rounds of each kind."""
    calls: int = 100
    """Calls of each round."""
    checkout: Path | None = None
    """Checkout of another version of rlxf. None compares nothing."""
    device: str = "cpu"
    """Device of the agents: cpu or cuda."""

    def __post_init__(self) -> None:
        if self.checkout is not None and self.device != "cpu":
            raise ValueError(
                f"checkout compares versions on the CPU, got device={self.device!r}; leave out one of them"
            )

    def run(self) -> None:
        """Measure and print the table."""
        torch.set_num_threads(1)
        if self.checkout is not None:
            Console().print(self.comparison(self.checkout))
        columns = ("environments", "call", "eager, ms", "compiled, ms", "ratio", "compiled in, s")
        table = Table(*columns, title="Acting step, 2 layers of 64, memory 128")
        for envs in self.envs:
            compilation, costs = self.measure(envs)
            for call, (eager, compiled) in costs.items():
                numbers = f"{eager:.2f}", f"{compiled:.2f}", f"{eager / compiled:.1f}"
                table.add_row(str(envs), call, *numbers, f"{compilation:.0f}")
        Console().print(table)

    def comparison(self, checkout: Path) -> Table:
        """Return the table of ``predict`` of another version, and of this one, eager and compiled."""
        versions = [(checkout, False), (ROOT, False), (ROOT, True)]
        columns = ("environments", f"{checkout}, ms", "this version, ms", "compiled, ms", "ratios")
        table = Table(*columns, title="predict of two versions")
        for envs in self.envs:
            runs = [[self._predict(*version, envs) for version in versions] for _ in range(3)]
            other, eager, compiled = map(min, zip(*runs, strict=True))
            ratios = f"{other / eager:.1f}, {other / compiled:.1f}"
            table.add_row(str(envs), *(f"{each:.2f}" for each in (other, eager, compiled)), ratios)
        return table

    def _predict(self, version: Path, compiled: bool, envs: int) -> float:
        """Return the milliseconds of ``predict`` in a process that imports a version."""
        arguments = map(str, (envs, self.rounds, self.calls, int(compiled)))
        environment = os.environ | {"PYTHONPATH": str(version), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-c", PREDICT, *arguments]  # -P: not the working directory
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout)

    def measure(self, envs: int) -> tuple[float, dict[str, tuple[float, float]]]:
        """Return the seconds of the compilation, and the milliseconds of each call, eager and compiled."""
        settings: list[Any] = [step_options(self.device, compiled) for compiled in (False, True)]
        agents = [
            GTrXLPPO("MlpPolicy", TASK, n_envs=envs, seed=0, device=self.device, **own) for own in settings
        ]
        calls = [acting_calls(agent) for agent in agents]
        compilation = seconds(calls[1]["predict"], self.device)
        return compilation, {name: self._compare([each[name] for each in calls]) for name in calls[0]}

    def _compare(self, calls: Sequence[Callable[[], object]]) -> tuple[float, float]:
        """Return the milliseconds of two calls, measured in turn."""
        rounds = [[self._round(call) for call in calls] for _ in range(self.rounds)]
        eager, compiled = (1000 * min(times) for times in zip(*rounds, strict=True))
        return eager, compiled

    def _round(self, call: Callable[[], object]) -> float:
        if is_cuda(self.device):
            return mean_seconds(call, self.calls, self.device)
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
            costs[step] = 1000 * median(
                seconds(partial(agent.predict, obs, state), agent.device) for _ in range(CALLS)
            )
        _, state = agent.predict(obs, state)
    return costs


def seconds(call: Callable[[], object], device: torch.device | str = "cpu") -> float:
    """Return the wall time of a call and of its work on a device, in seconds."""
    start = now(device)
    call()
    return now(device) - start


def mean_seconds(call: Callable[[], object], calls: int, device: str) -> float:
    """Return the mean wall time of some calls, in seconds; the program waits for the device at their end."""
    start = now(device)
    for _ in range(calls):
        call()
    return (now(device) - start) / calls


def processor_seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of a call, in seconds."""
    start = time.process_time()
    call()
    return time.process_time() - start
