"""Environment steps per second of rollouts and of training, with environments of tensors and of arrays."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import get_device

from benchmarks.machine import machine, now
from rlxf import GTrXLPPO
from rlxf.agents.gtrxl import gtrxl
from rlxf.envs.tmaze_tensor import TMazeTensor
from rlxf.envs.tmaze_vector import TMazeVector

ENVS = ("arrays", "tensors")


class PhaseClock(BaseCallback):
    """Callback that measures the seconds of each rollout, and of each training with a single rollout.

    They are processor times, which other programs affect less, or elapsed times on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rollouts: list[float] = []
        self.iterations: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self._start = self._now()

    def _on_rollout_end(self) -> None:
        self.rollouts.append(self._now() - self._start)

    def _on_training_end(self) -> None:
        self.iterations.append(self._now() - self._start)

    def _now(self) -> float:
        return now(self.model.device, time.process_time)


@dataclass
class Tensors:
    """Environment steps per second with T-Mazes whose results are tensors on the device, or arrays.

    The agents, their actions and their updates are equal. Rollouts of the two kinds alternate. The times are
    processor times, or elapsed times on a GPU.
    """

    copies: tuple[int, ...] = (32, 512, 4096)
    """Numbers of environments."""
    corridor: int = 10
    """Corridor length; an episode has one step more."""
    n_steps: int = 16
    """Steps of each environment in a rollout."""
    rollouts: int = 2
    """Timed rollouts of each kind."""
    memory: int = 64
    """Steps in memory."""
    width: int = 64
    """Width of the transformer, which has two layers."""
    device: str = "auto"
    """Device of agent and tensors."""
    out: Path | None = None
    """JSON output file; None: no output."""

    def run(self) -> None:
        """Measure, print the table, and write the numbers."""
        results = [self.measure(copies) for copies in self.copies]
        Console().print(self.table(results))
        if self.out is not None:
            report = {"machine": machine(), "device": str(get_device(self.device)), "rates": results}
            self.out.write_text(json.dumps(report, indent=2))

    def measure(self, copies: int) -> dict[str, Any]:
        """Return the steps per second of all phases with this number of environments."""
        clocks = {name: PhaseClock() for name in ENVS}
        agents = {name: self._agent(name, copies) for name in ENVS}
        rollout = copies * self.n_steps
        for number in range(self.rollouts + 1):
            for name, agent in agents.items():
                agent.learn(rollout, callback=clocks[name], reset_num_timesteps=number == 0)
        rates: dict[str, Any] = {"copies": copies, "environments": self._environment_rates(copies)}
        for phase in ("rollouts", "iterations"):
            seconds = {name: getattr(clocks[name], phase)[1:] for name in ENVS}
            rates[phase] = {name: median([rollout / each for each in seconds[name]]) for name in ENVS}
        return rates

    def table(self, results: list[dict[str, Any]]) -> Table:
        """Return the rates as a table."""
        table = Table("copies", "steps per second", *ENVS, "tensors / arrays")
        phases = {"environments": "environment", "rollouts": "rollout", "iterations": "rollout and update"}
        for rates in results:
            for phase, name in phases.items():
                arrays, tensors = (rates[phase][kind] for kind in ENVS)
                numbers = f"{arrays:,.0f}", f"{tensors:,.0f}", f"{tensors / arrays:.2f}"
                table.add_row(f"{rates['copies']:,}", name, *numbers)
        return table

    def _environment(self, name: str, copies: int) -> Any:
        if name == "tensors":
            return TMazeTensor(copies, self.corridor, device=self.device)
        return TMazeVector(copies, self.corridor)

    def _agent(self, name: str, copies: int) -> GTrXLPPO:
        return GTrXLPPO(
            "MlpGTrXLPolicy",
            self._environment(name, copies),
            n_steps=self.n_steps,
            segment_length=self.n_steps,
            batch_size=max(256, copies * self.n_steps // 8),
            n_epochs=1,
            core=gtrxl(self.memory, width=self.width, layers=2),
            seed=0,
            device=self.device,
        )

    def _environment_rates(self, copies: int) -> dict[str, float]:
        """Return the steps per second of the environments alone, with the same actions in each step."""
        device = get_device(self.device)
        actions = torch.zeros(copies, dtype=torch.long, device=device)
        given = {"arrays": actions.cpu().numpy(), "tensors": actions}
        rates = {}
        for name in ENVS:
            env = self._environment(name, copies)
            env.reset(seed=0)
            start = now(device, time.process_time)
            for _ in range(10 * env.rules.horizon):
                env.step(given[name])
            elapsed = now(device, time.process_time) - start
            rates[name] = copies * 10 * env.rules.horizon / elapsed
        return rates
