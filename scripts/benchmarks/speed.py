"""Environment steps per second, memory and cost of acting, side by side with other programs."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import cleanrl, ours
from benchmarks.acting import acting_milliseconds
from benchmarks.machine import machine
from benchmarks.operations import matrix_rate, steps_per_second_at_most
from benchmarks.recurrent import recurrent_ppo
from benchmarks.shapes import SMALL, Shape, cleanrl_shape
from benchmarks.throughput import iteration_rates, typical
from rlxf.envs.make import make_vec_env

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlxf" / "cleanrl-venv"
TMAZE, LIGHT = "rlxf/TMaze-v0", "benchmarks.light_task:LightTask-v0"
PLAIN, GATED = cleanrl_shape(gated=False), cleanrl_shape(gated=True)
MINIBATCHES = (128, SMALL.minibatch)
"""Of RecurrentPPO: its default, and ours."""
ROLLOUT = 512
"""Steps of a rollout whose memory is compared: the default of CleanRL's ppo_trxl.py."""
ACTING_STEPS = (10, 100, 1_000, 10_000)
ACTING_ENVS = (1, 32)


@dataclass(frozen=True)
class Row:
    """One program at one shape.

    Args:
        program: its name.
        setting: what it ran, for people.
        rates: environment steps per second of each iteration.
        shape: sizes of its transformer; None for an LSTM, which has no floor here.
        peers: the rows it is compared with.
    """

    program: str
    setting: str
    rates: list[float]
    shape: Shape | None = None
    peers: tuple["Row", ...] = ()

    @property
    def rate(self) -> float:
        """Typical environment steps per second."""
        return typical(self.rates)

    def at_most(self, matrix_rate: float) -> float | None:
        """Steps per second if only its operations took time; None without a shape."""
        return None if self.shape is None else steps_per_second_at_most(self.shape, matrix_rate)


@dataclass
class Speed:
    """Environment steps per second over rollout plus training, beside RecurrentPPO and CleanRL.

    Also the rate of matrix products in the same run and the floor it sets, the memory of a rollout, and
    what one acting step costs early and late in an episode. For numbers that count, leave the machine alone.
    """

    cleanrl: Path | None = None
    """A checkout of github.com/vwxyzjn/cleanrl: runs its ppo_trxl.py unchanged (5 minutes, 9 GB)."""
    cleanrl_venv: Path = CACHE
    """Where to make the environment that CleanRL needs."""
    cleanrl_iterations: int = 2
    """Iterations of CleanRL to time, after one to warm up."""
    iterations: int = 8
    """Iterations of the others to time, after one to warm up."""
    output: Path = Path("runs/bench-speed.json")
    """Where to write all numbers."""

    def run(self) -> None:
        """Measure, print the tables, write the numbers."""
        before = matrix_rate()
        small = beside_recurrent_ppo(self.iterations)
        theirs, peak = self.cleanrl_rows()
        rows = [*small, *theirs, *at_cleanrl_shape(self.iterations, tuple(theirs))]
        peak["GTrXLPPO"] = getrusage(RUSAGE_SELF).ru_maxrss * 1024
        rate, memory = max(before, matrix_rate()), rollout_bytes()
        acting = {envs: acting_cost(envs) for envs in ACTING_ENVS}
        self.show(speed_table(rows, rate), memory_table(memory, peak), acting_table(acting))
        found = {
            "machine": machine(),
            "matrix_rate": rate,
            "programs": [as_data(row, rate) for row in rows],
            "rollout_bytes": memory,
            "peak_bytes": peak,
            "acting_milliseconds": acting,
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(found, indent=1))

    def cleanrl_rows(self) -> tuple[list[Row], dict[str, int]]:
        """CleanRL's row and the peak of its memory; nothing without a checkout."""
        if self.cleanrl is None:
            return [], {}
        run = cleanrl.run(self.cleanrl, self.cleanrl_venv, PLAIN, self.cleanrl_iterations)
        return [Row("CleanRL", "3 layers of 384, plain", run.rates, PLAIN)], {"CleanRL": run.peak_bytes}

    def show(self, *tables: Table) -> None:
        """Print tables, and where the numbers go."""
        console = Console(width=120)
        for table in tables:
            console.print(table)
        console.print(f"numbers: {self.output}")


def beside_recurrent_ppo(iterations: int) -> list[Row]:
    """RecurrentPPO and GTrXLPPO on the T-Maze."""
    theirs = []
    # Theirs first: ours has torch flush denormal numbers, for the whole process.
    for minibatch in MINIBATCHES:
        agent = recurrent_ppo(
            make_vec_env(TMAZE, SMALL.envs, seed=0), replace(SMALL, minibatch=minibatch), seed=0
        )
        rates = iteration_rates(agent, iterations)
        theirs.append(Row(f"RecurrentPPO, minibatch {minibatch}", "LSTM of 64", rates))
    mine = ours.gtrxl_ppo(make_vec_env(TMAZE, SMALL.envs, seed=0), SMALL, seed=0)
    rates = iteration_rates(mine, iterations)
    return [*theirs, Row("GTrXLPPO", "2 layers of 64, gated", rates, SMALL, tuple(theirs))]


def at_cleanrl_shape(iterations: int, peers: tuple[Row, ...]) -> list[Row]:
    """GTrXLPPO at the sizes of ppo_trxl.py, on the task that is given to it too."""
    rows = []
    for name, shape in (("plain", PLAIN), ("gated", GATED)):
        agent = ours.gtrxl_ppo(make_vec_env(LIGHT, shape.envs, seed=0), shape, seed=0)
        rates = iteration_rates(agent, iterations)
        rows.append(Row("GTrXLPPO", f"3 layers of 384, {name}", rates, shape, peers))
    return rows


def rollout_bytes() -> dict[str, dict[str, int]]:
    """What each program keeps of a rollout of 512 steps, and what it copies together for one minibatch."""
    agent = ours.gtrxl_ppo(make_vec_env(LIGHT, PLAIN.envs, seed=0), PLAIN, n_steps=ROLLOUT)
    return {
        "GTrXLPPO": {"kept": agent.rollout_buffer.nbytes, "gathered": ours.gathered_bytes(PLAIN)},
        "CleanRL": {"kept": cleanrl.stored_bytes(PLAIN, ROLLOUT), "gathered": cleanrl.gathered_bytes(PLAIN)},
    }


def acting_cost(envs: int) -> dict[int, float]:
    """Milliseconds of one acting step of the small agent at each of `ACTING_STEPS`."""
    agent = ours.gtrxl_ppo(make_vec_env(TMAZE, 1, seed=0), SMALL, seed=0)
    return acting_milliseconds(agent, envs, ACTING_STEPS)


def as_data(row: Row, matrix_rate: float) -> dict[str, Any]:
    """A row as JSON takes it."""
    ratios = {peer.program: row.rate / peer.rate for peer in row.peers}
    data = asdict(replace(row, peers=()))
    return {**data, "rate": row.rate, "at_most": row.at_most(matrix_rate), "beside": ratios}


def speed_table(rows: list[Row], matrix_rate: float) -> Table:
    """A line for each program; "at most" is what its operations alone would allow."""
    title = f"Rollout plus training, {matrix_rate / 1e9:.0f} GFLOP/s, {torch.get_num_threads()} threads"
    columns = ("program", "setting", "steps/s", "all iterations", "at most", "reached", "beside")
    table = Table(*columns, title=title)
    for row in rows:
        most = row.at_most(matrix_rate)
        bound = ("", "") if most is None else (f"{most:.0f}", f"{row.rate / most:.2f}")
        ratios = "\n".join(f"{row.rate / peer.rate:.1f} x {peer.program}" for peer in row.peers)
        span = f"{min(row.rates):.0f} to {max(row.rates):.0f}"
        table.add_row(row.program, row.setting, f"{row.rate:.0f}", span, *bound, ratios)
    return table


def memory_table(memory: dict[str, dict[str, int]], peak: dict[str, int]) -> Table:
    """Megabytes at CleanRL's shape. The peak of GTrXLPPO is that of this whole benchmark."""
    columns = ("program", "rollout kept", "gathered for a minibatch", "both", "peak of the process")
    table = Table(*columns, title=f"Memory at 3 layers of 384, {ROLLOUT} steps of {PLAIN.envs}, MB")
    for program, parts in memory.items():
        sizes = [parts["kept"], parts["gathered"], sum(parts.values()), peak.get(program, 0)]
        table.add_row(program, *(f"{size / 1e6:.0f}" if size else "" for size in sizes))
    return table


def acting_table(acting: dict[int, dict[int, float]]) -> Table:
    """Milliseconds of one `predict` by step of the episode."""
    title = "One acting step, 2 layers of 64, memory 128, ms"
    table = Table("environments", *(f"step {step}" for step in ACTING_STEPS), title=title)
    for envs, costs in acting.items():
        table.add_row(str(envs), *(f"{costs[step]:.2f}" for step in ACTING_STEPS))
    return table
