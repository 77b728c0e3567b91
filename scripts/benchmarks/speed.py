"""Throughput, memory and acting cost of GTrXLPPO compared with other implementations."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.vec_env import VecEnv

from benchmarks import cleanrl, gtrxl_agents
from benchmarks.acting import acting_milliseconds
from benchmarks.machine import machine
from benchmarks.operations import matrix_rate, steps_per_second_at_most, torch_matrix_rate
from benchmarks.shapes import SMALL, Shape, cleanrl_shape
from benchmarks.throughput import iteration_rates
from rlxf.agents.common.precision import Precision
from rlxf.envs.make import make_vec_env

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlxf" / "cleanrl-venv"
TMAZE, LIGHT = "rlxf/TMaze-v0", "benchmarks.light_task:LightTask-v0"
PLAIN, GATED = cleanrl_shape(gated=False), cleanrl_shape(gated=True)
MINIBATCHES = (128, SMALL.minibatch)
"""Minibatch sizes of RecurrentPPO: its default and that of GTrXLPPO."""
ROLLOUT = 512
"""Rollout steps for the comparison of memory: the default of CleanRL's ppo_trxl.py."""
ACTING_ENVS = (1, 32)


@dataclass(frozen=True)
class Row:
    """Result of one program with one shape.

    Args:
        program: name of the program.
        setting: description of its settings.
        rates: environment steps per second of each iteration.
        shape: sizes of its transformer; None for an LSTM, which has no upper bound here.
        peers: rows with which it is compared.
    """

    program: str
    setting: str
    rates: list[float]
    shape: Shape | None = None
    peers: tuple["Row", ...] = ()

    @property
    def rate(self) -> float:
        """Median environment steps per second, which is robust to other programs on the machine."""
        return median(self.rates)

    def at_most(self, matrix_rate: float) -> float | None:
        """Return the upper bound of steps per second from its operation count; None without a shape."""
        return None if self.shape is None else steps_per_second_at_most(self.shape, matrix_rate)


def recurrent_ppo(env: VecEnv, shape: Shape, **options: Any) -> RecurrentPPO:
    """Build a RecurrentPPO with the width, rollouts and minibatches of a shape.

    Other settings are RecurrentPPO's defaults: a separate LSTM for the critic, and two hidden layers of 64.
    """
    return RecurrentPPO(
        "MlpLstmPolicy",
        env,
        n_steps=shape.steps,
        batch_size=shape.minibatch,
        n_epochs=shape.epochs,
        policy_kwargs={"lstm_hidden_size": shape.width},
        **options,
    )


@dataclass
class Speed:
    """Environment steps per second over rollout and training, compared with RecurrentPPO and CleanRL.

    The benchmark also measures the rate of matrix products with the bound that it implies, the memory of a
    rollout, and the time of an acting step early and late in an episode. For reliable numbers, run no other
    programs on the machine.
    """

    cleanrl: Path | None = None
    """Checkout of github.com/vwxyzjn/cleanrl, to run its unmodified ppo_trxl.py (5 minutes, 9 GB)."""
    cleanrl_venv: Path = CACHE
    """Folder of the virtual environment of CleanRL."""
    cleanrl_iterations: int = 2
    """Timed iterations of CleanRL, after one for warm-up."""
    iterations: int = 8
    """Timed iterations of the other programs, after one for warm-up."""
    acting_steps: tuple[int, ...] = (10, 100, 1_000, 10_000)
    """Steps of an episode at which an acting step is timed."""
    compile: bool = False
    """Compile acting steps and updates of GTrXLPPO on the CPU; on a GPU, they are always captured."""
    precision: Precision = "float32"
    """Precision of the updates of GTrXLPPO; upper bounds are those of float32 in any case."""
    device: str = "cpu"
    """Device of all programs: cpu or cuda."""
    output: Path = Path("runs/bench-speed.json")
    """Output file."""

    def run(self) -> None:
        """Measure, print the tables, write the numbers."""
        before = matrix_rate(self.device)
        own: dict[str, Any] = {
            "device": self.device,
            "compile": self.compile,
            "precision": self.precision,
        }
        small = compare_recurrent_ppo(self.iterations, **own)
        theirs, peak = self.cleanrl_rows()
        rows = [*small, *theirs, *at_cleanrl_shape(self.iterations, tuple(theirs), **own)]
        peak["GTrXLPPO"] = getrusage(RUSAGE_SELF).ru_maxrss * 1024
        rate, memory = max(before, matrix_rate(self.device)), rollout_bytes(self.device)
        acting = {envs: acting_cost(envs, self.acting_steps, **own) for envs in ACTING_ENVS}
        torch_rate = torch_matrix_rate(self.device)
        self.show(speed_table(rows, rate, torch_rate), memory_table(memory, peak), acting_table(acting))
        results = {
            "machine": machine(),
            **own,
            "matrix_rate": rate,
            "torch_matrix_rate": torch_rate,
            "programs": [as_data(row, rate) for row in rows],
            "rollout_bytes": memory,
            "peak_bytes": peak,
            "acting_milliseconds": acting,
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(results, indent=1))

    def cleanrl_rows(self) -> tuple[list[Row], dict[str, int]]:
        """Return the row of CleanRL and its peak memory; empty without a checkout."""
        if self.cleanrl is None:
            return [], {}
        run = cleanrl.run(self.cleanrl, self.cleanrl_venv, PLAIN, self.cleanrl_iterations, self.device)
        return [Row("CleanRL", "3 layers of 384, plain", run.rates, PLAIN)], {"CleanRL": run.peak_bytes}

    def show(self, *tables: Table) -> None:
        """Print tables and the path of the output file."""
        console = Console(width=120)
        for table in tables:
            console.print(table)
        console.print(f"numbers: {self.output}")


def compare_recurrent_ppo(iterations: int, device: str, **own: Any) -> list[Row]:
    """Measure RecurrentPPO and GTrXLPPO on the T-Maze.

    Args:
        iterations: timed iterations.
        device: device of both programs.
        own: further arguments of GTrXLPPO.
    """
    theirs = []
    # RecurrentPPO runs first, as GTrXLPPO makes torch flush denormal numbers in the whole process.
    for minibatch in MINIBATCHES:
        env, shape = make_vec_env(TMAZE, SMALL.envs, seed=0), replace(SMALL, minibatch=minibatch)
        agent = recurrent_ppo(env, shape, seed=0, device=device)
        rates = iteration_rates(agent, iterations)
        theirs.append(Row(f"RecurrentPPO, minibatch {minibatch}", "LSTM of 64", rates))
    env = make_vec_env(TMAZE, SMALL.envs, seed=0)
    gtrxl = gtrxl_agents.gtrxl_ppo(env, SMALL, seed=0, device=device, **own)
    rates = iteration_rates(gtrxl, iterations)
    return [*theirs, Row("GTrXLPPO", "2 layers of 64, gated", rates, SMALL, tuple(theirs))]


def at_cleanrl_shape(iterations: int, peers: tuple[Row, ...], **own: Any) -> list[Row]:
    """Measure GTrXLPPO with the sizes of ppo_trxl.py and arguments ``own``, on the same task."""
    rows = []
    for name, shape in (("plain", PLAIN), ("gated", GATED)):
        env = make_vec_env(LIGHT, shape.envs, seed=0)
        agent = gtrxl_agents.gtrxl_ppo(env, shape, seed=0, **own)
        rates = iteration_rates(agent, iterations)
        rows.append(Row("GTrXLPPO", f"3 layers of 384, {name}", rates, shape, peers))
    return rows


def rollout_bytes(device: str) -> dict[str, dict[str, int]]:
    """Return the bytes that each program stores for a rollout of 512 steps, and gathers for a minibatch."""
    env = make_vec_env(LIGHT, PLAIN.envs, seed=0)
    agent = gtrxl_agents.gtrxl_ppo(env, PLAIN, n_steps=ROLLOUT, device=device)
    buffer = agent.rollout_buffer
    parts = [*vars(buffer).values(), *vars(buffer.index).values()]
    kept = sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
    return {
        "GTrXLPPO": {"kept": kept, "gathered": gtrxl_agents.gathered_bytes(PLAIN)},
        "CleanRL": {"kept": cleanrl.stored_bytes(PLAIN, ROLLOUT), "gathered": cleanrl.gathered_bytes(PLAIN)},
    }


def acting_cost(envs: int, steps: Sequence[int], **own: Any) -> dict[int, float]:
    """Return the milliseconds of an acting step of the small agent at each of ``steps`` of an episode."""
    agent = gtrxl_agents.gtrxl_ppo(make_vec_env(TMAZE, 1, seed=0), SMALL, seed=0, **own)
    return acting_milliseconds(agent, envs, steps)


def as_data(row: Row, matrix_rate: float) -> dict[str, Any]:
    """Convert a row to JSON data."""
    ratios = {peer.program: row.rate / peer.rate for peer in row.peers}
    data = asdict(replace(row, peers=()))
    return {**data, "rate": row.rate, "at_most": row.at_most(matrix_rate), "ratios": ratios}


def speed_table(rows: list[Row], matrix_rate: float, torch_rate: float) -> Table:
    """Return a table with a row for each program; "at most" is the bound from its operation count."""
    rates = f"{matrix_rate / 1e9:.0f} GFLOP/s ({torch_rate / 1e9:.0f} with torch's settings)"
    title = f"Rollout plus training, {rates}, {torch.get_num_threads()} threads"
    columns = ("program", "setting", "steps/s", "all iterations", "at most", "reached", "compared with")
    table = Table(*columns, title=title)
    for row in rows:
        most = row.at_most(matrix_rate)
        bound = ("", "") if most is None else (f"{most:.0f}", f"{row.rate / most:.2f}")
        ratios = "\n".join(f"{row.rate / peer.rate:.1f} x {peer.program}" for peer in row.peers)
        span = f"{min(row.rates):.0f} to {max(row.rates):.0f}"
        table.add_row(row.program, row.setting, f"{row.rate:.0f}", span, *bound, ratios)
    return table


def memory_table(memory: dict[str, dict[str, int]], peak: dict[str, int]) -> Table:
    """Return a table of memory in MB at CleanRL's shape.

    The peak of GTrXLPPO is that of this process. Peaks do not include the memory of a GPU.
    """
    columns = ("program", "stored rollout", "gathered for a minibatch", "both", "peak of the process")
    table = Table(*columns, title=f"Memory at 3 layers of 384, {ROLLOUT} steps of {PLAIN.envs}, MB")
    for program, parts in memory.items():
        sizes = [parts["kept"], parts["gathered"], sum(parts.values()), peak.get(program, 0)]
        table.add_row(program, *(f"{size / 1e6:.0f}" if size else "" for size in sizes))
    return table


def acting_table(acting: dict[int, dict[int, float]]) -> Table:
    """Return a table of milliseconds of one `predict` by step of the episode."""
    title = "One acting step, 2 layers of 64, memory 128, ms"
    steps = next(iter(acting.values()))
    table = Table("environments", *(f"step {step}" for step in steps), title=title)
    for envs, costs in acting.items():
        table.add_row(str(envs), *(f"{cost:.2f}" for cost in costs.values()))
    return table
