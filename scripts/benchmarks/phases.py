"""Time of environment steps and of minibatches of GTrXLPPO on a device, with and without compilation."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gtrxl_agents import gtrxl_ppo
from benchmarks.machine import is_cuda, machine, now, step_options
from benchmarks.shapes import SMALL, Shape, cleanrl_shape
from benchmarks.speed import LIGHT, TMAZE
from benchmarks.throughput import IterationClock
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.envs.make import make_vec_env
from rlxf.envs.tmaze_tensor import TMazeTensor

CORRIDOR = 10
"""Corridor length of the T-Mazes of tensors."""


class PhaseTimes(IterationClock):
    """Clock of the iterations that also records the end of each rollout, where an update starts."""

    def _on_rollout_end(self) -> None:
        self.times.append(now(self.model.device))

    def seconds(self) -> tuple[float, float]:
        """Return the median seconds of a rollout and of an update, after one of each for warm-up."""
        spans = [end - start for start, end in pairwise(self.times)]
        return median(spans[2::2]), median(spans[3::2])


@dataclass(frozen=True)
class Case:
    """Agent of a row of the table.

    Args:
        name: description of its sizes.
        build: builds it; takes ``device`` and one of `step_options`.
    """

    name: str
    build: Callable[..., GTrXLPPO]


def by_arrays(name: str, env_id: str, shape: Shape) -> Case:
    """Return an agent with the sizes of a shape, in environments of arrays."""
    return Case(name, lambda **own: gtrxl_ppo(make_vec_env(env_id, shape.envs, seed=0), shape, seed=0, **own))


def by_tensors(copies: int) -> Case:
    """Return an agent with the default core, in T-Mazes whose tensors are on the device."""
    sizes: dict[str, Any] = {
        "n_steps": 16,
        "segment_length": 16,
        "batch_size": max(256, 2 * copies),
        "n_epochs": 1,
    }

    def build(device: str, **options: Any) -> GTrXLPPO:
        env = TMazeTensor(copies, CORRIDOR, device=device)
        return GTrXLPPO("MlpGTrXLPolicy", env, seed=0, device=device, **options, **sizes)

    return Case(f"2 layers of 64, {copies} environments of tensors", build)


@dataclass
class Phases:
    """Milliseconds of an environment step of all environments and of a minibatch, in float32.

    Each agent is trained with and without ``compile``, or ``cuda_graphs`` on a GPU. There, the last columns
    have the number of launches of kernels and graphs for a minibatch, and the milliseconds that the GPU
    computes for it.
    """

    device: str = "cpu"
    """Device of agents and of environments of tensors."""
    iterations: int = 4
    """Timed rollouts and updates, after one for warm-up; medians count."""
    copies: tuple[int, ...] = (32, 512, 4096)
    """Numbers of environments of tensors."""

    def run(self) -> None:
        """Measure and print the table."""
        columns = ("agent", "compiled", "ms per step", "ms per minibatch", "steps/s", "launches", "GPU, ms")
        name = machine()["gpu"] if is_cuda(self.device) else "the CPU"
        table = Table(*columns, title=f"GTrXLPPO on {name}")
        for case in self.cases():
            for compiled in (False, True):
                table.add_row(case.name, str(compiled), *self.measure(case, compiled))
        Console(width=140).print(table)

    def cases(self) -> list[Case]:
        """Return the agents: two sizes of the comparison with other programs, and environments of tensors."""
        arrays = [by_arrays("2 layers of 64, 32 environments", TMAZE, SMALL)]
        for name, gated in (("plain", False), ("gated", True)):
            shape = cleanrl_shape(gated)
            arrays.append(by_arrays(f"3 layers of 384, {name}, {shape.envs} environments", LIGHT, shape))
        return [*arrays, *map(by_tensors, self.copies)]

    def measure(self, case: Case, compiled: bool) -> tuple[str, ...]:
        """Return the cells of a row."""
        options = step_options(self.device, compiled)
        agent, phases = case.build(device=self.device, **options), PhaseTimes()
        steps = agent.n_envs * agent.n_steps
        agent.learn((1 + self.iterations) * steps, phases)
        rollout, update = phases.seconds()
        minibatches = agent.n_epochs * steps / agent.batch_size
        milliseconds = 1000 * rollout / agent.n_steps, 1000 * update / minibatches
        cells = *(f"{x:,.2f}" for x in milliseconds), f"{steps / (rollout + update):,.0f}"
        launched = launches(agent) if is_cuda(self.device) else ()
        return *cells, *(f"{x / minibatches:,.1f}" for x in launched)


def launches(agent: GTrXLPPO) -> tuple[float, float]:
    """Return the number of launches of an update on a GPU, and the milliseconds of its kernels."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        agent.train()
        now(agent.device)
    events = profiler.key_averages()
    launched = sum(each.count for each in events if "LaunchKernel" in each.key or "GraphLaunch" in each.key)
    kernels = (each.self_device_time_total for each in events if each.device_type == DeviceType.CUDA)
    return launched, sum(kernels) / 1000
