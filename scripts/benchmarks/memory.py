"""Success and cost of memories on a hint that is older than the raw tokens in memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.acting import processor_seconds
from benchmarks.distillation import step_in_episode
from benchmarks.gtrxl_agents import FEWER_UPDATES
from benchmarks.result_cache import SuccessCurve, check_names, run_missing
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.gtrxl.core import gtrxl
from rlxf.agents.gtrxl.rollout_collector import memory_receptive_field
from rlxf.attention import KNN, Compressive, Full, TransformerSpec
from rlxf.envs.make import make_vec_env
from rlxf.envs.tmaze import PenaltyRule
from rlxf.evaluation import EvaluationCallback

ENVS, RATIO, TOP = 32, 4, 32
CALLS = 300
"""Number of timed calls of ``predict``."""


@dataclass(frozen=True)
class Run(SuccessCurve):
    """Result of one agent.

    Args:
        memory: name of the memory.
        seed: random seed.
        training: milliseconds of CPU time per environment step, for rollout and updates.
        acting: median milliseconds of CPU time of ``predict`` for one environment.
        carried: bytes of the acting state per environment: keys and values in memory.
        remembered: bytes of the initial state of a segment per environment: hidden states.
        curve: (environment steps, success) of each evaluation.
    """

    memory: str
    seed: int
    training: float
    acting: float
    carried: int
    remembered: int
    curve: list[tuple[int, float]]


@dataclass
class MemoryBench:
    """GTrXLPPO with XL, Compressive and KNN memory on a T-Maze four times as long as the raw memory.

    At the junction, the hint is L steps old. The pattern is Window(M + 1), so each token attends to M
    previous steps in each layer. The last of N layers of XL therefore depends on N M steps, here 32, and
    the hint is beyond this range for any path through layers and segments. Actions are part of the tokens but
    cannot pass the hint on: after any wrong step, the agent does not reach an arm in time. XL can only
    guess, with a success rate of 0.5. In addition to the M raw steps, Compressive attends to compressed
    blocks of 4 steps, and KNN to the 32 nearest keys in one layer; both reach the hint. Other sizes, for
    which this does not hold, are rejected.

    Completed runs are lines of the output file and are not repeated. Times are CPU times, so other processes
    on the machine matter little.
    """

    memories: tuple[str, ...] = ("XL", "Compressive", "KNN")
    """Names of the memories."""
    length: int = 16
    """Number of raw steps M in each memory."""
    corridor: int = 64
    """Steps L from the hint to the junction."""
    penalty_rule: PenaltyRule = "step"
    """step penalizes each wrong step, so that all agents learn to walk; schedule is that of the paper."""
    layers: int = 2
    """Layers N."""
    steps: int = 250_000
    """Environment steps per run. With a memory of 128, corridors of 50 and 100 need 60,000 to 220,000."""
    seeds: int = 5
    """Runs per memory."""
    evaluations: int = 20
    """Evenly spaced evaluations of each run."""
    episodes: int = 200
    """Episodes per evaluation."""
    processes: int = 1
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-memory.jsonl")
    """Output file with a line for each run."""

    def __post_init__(self) -> None:
        check_names(memories=(self.memories, ("XL", "Compressive", "KNN")))
        if (reach := memory_receptive_field(self.core("XL"))) >= self.corridor:
            raise ValueError(
                f"XL must not reach the hint: {self.layers} layers of {self.length} steps reach {reach} "
                f"steps back, but the corridor has {self.corridor}; use a longer corridor"
            )

    def run(self) -> None:
        """Train missing runs, write each result, and print the table."""
        jobs: dict[str, Callable[[], Run]] = {
            self.key(name, seed): partial(self.train, name, seed)
            for seed in range(self.seeds)
            for name in self.memories
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        Console(width=140).print(self.table(runs), f"curves: {self.output}")

    def key(self, name: str, seed: int) -> str:
        """Return the key of a run in the output file."""
        sizes = f"M {self.length}, corridor {self.corridor}, {self.layers} layers, {self.steps} steps"
        task = f"penalty by {self.penalty_rule}, {self.evaluations} x {self.episodes} episodes"
        return f"{name}, {sizes}, {task}, seed {seed}"

    def core(self, name: str) -> TransformerSpec:
        """Return the default core with a memory of M raw tokens that reaches the hint, except for XL."""
        core, far = gtrxl(self.length, layers=self.layers), max(1, self.corridor - self.length)
        if name == "Compressive":
            memory = Compressive(recent=self.length, compressed=-(-far // RATIO), ratio=RATIO)
            return replace(core, memory=memory, pattern=Full())
        if name == "KNN":
            return replace(core, memory=KNN(self.length, far, min(TOP, far)))
        return core

    def train(self, name: str, seed: int) -> Run:
        """Train and measure one agent."""
        task = {"corridor_length": self.corridor, "penalty_rule": self.penalty_rule}
        env = make_vec_env("rlxf/TMaze-v0", ENVS, seed, env_kwargs=task)
        tests = make_vec_env("rlxf/TMaze-v0", ENVS, env_kwargs=task)
        agent = GTrXLPPO("MlpGTrXLPolicy", env, seed=seed, core=self.core(name), **FEWER_UPDATES)
        callback = TimedEvaluations(tests, self.episodes, self.steps // self.evaluations)
        start = time.process_time()
        agent.learn(self.steps, callback=callback)
        training = 1000 * (time.process_time() - start - callback.processor_seconds) / agent.num_timesteps
        step = step_in_episode(agent, make_vec_env("rlxf/TMaze-v0", 1, seed, env_kwargs=task))
        acting = 1000 * median(processor_seconds(step) for _ in range(CALLS))
        curve = [(step, report.success_rate or 0.0) for step, report in callback.reports.items()]
        carried = bytes_of_a_row(agent.policy.initial_state)
        remembered = bytes_of_a_row(agent.policy.transformer.initial_state)
        return Run(name, seed, training, acting, carried, remembered, curve)

    def table(self, runs: list[Run]) -> Table:
        """Return a table with a row for each memory."""
        result = Table(
            "memory",
            "maximum reach",
            "seeds solved",
            "solved at",
            "success at the end",
            "ms per step, training",
            "ms, predict",
            "bytes of acting state",
            "bytes of segment state",
            title=f"T-Maze of {self.corridor}, penalty by {self.penalty_rule}, {self.length} raw tokens, "
            f"{self.steps:,} steps",
        )
        for name in self.memories:
            result.add_row(name, f"{memory_receptive_field(self.core(name))}", *cells(runs, name))
        return result


class TimedEvaluations(EvaluationCallback):
    """Evaluation callback that measures its CPU time."""

    processor_seconds = 0.0

    def on_interval(self) -> int:
        """Evaluate and add the CPU time to ``processor_seconds``."""
        start = time.process_time()
        steps = super().on_interval()
        self.processor_seconds += time.process_time() - start
        return steps


def cells(runs: list[Run], name: str) -> list[str]:
    """Return the cells of the runs of one memory."""
    own = [run for run in runs if run.memory == name]
    solved = [run.solved_at for run in own if run.solved_at is not None]
    return [
        f"{len(solved)} of {len(own)}",
        ", ".join(f"{step:,}" for step in solved),
        ", ".join(f"{run.curve[-1][1]:.2f}" for run in own),
        f"{mean(run.training for run in own):.3f}",
        f"{median(run.acting for run in own):.2f}",
        f"{own[0].carried:,}",
        f"{own[0].remembered:,}",
    ]


def bytes_of_a_row(begin: Callable[[int], Any]) -> int:
    """Return the bytes per environment of the state that ``begin`` creates for a number of environments."""
    return bytes_in(begin(2)) - bytes_in(begin(1))


def bytes_in(value: Any) -> int:
    """Return the bytes of all tensors in nested dataclasses, lists and tuples."""
    if isinstance(value, Tensor):
        return value.nbytes
    if is_dataclass(value):
        return sum(bytes_in(getattr(value, field.name)) for field in fields(value))
    return sum(map(bytes_in, value)) if isinstance(value, list | tuple) else 0
