"""Returns, cost and size of recurrent mixers and memories in GTrXLPPO, on tasks that need memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
from rich.console import Console
from rich.table import Table
from stable_baselines3.common.env_util import make_vec_env as make_sb3_env
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.defaults import masked_cart_pole
from benchmarks.mixers import core_of, state_bytes
from benchmarks.ours import FEWER_UPDATES
from benchmarks.result_cache import run_missing
from rlxf.agents.gtrxl import GTrXLPPO, gtrxl
from rlxf.attention import RATE, RMT, Full, GatedDeltaNet, StreamingXL, TransformerSpec
from rlxf.attention.registry import TECHNIQUES
from rlxf.envs.make import make_vec_env
from rlxf.evaluation import EvaluationCallback

ENVS, EVALUATIONS, EPISODES = 32, 10, 100


@dataclass(frozen=True)
class Task:
    """Task that needs memory.

    Args:
        env: a Gymnasium id, or a function that makes one environment.
        steps: environment steps of training.
        solved: mean return from which the task counts as solved.
    """

    env: str | Callable[[], gymnasium.Env]
    steps: int
    solved: float

    def environments(self, seed: int | None = None) -> VecEnv:
        """Create 32 environments."""
        if isinstance(self.env, str):
            return make_vec_env(self.env, ENVS, seed)
        return make_sb3_env(self.env, ENVS, seed)


TASKS = {
    "TMaze 50": Task("rlxf/TMaze-v0", 150_000, 0.95),
    "RepeatPreviousEasy": Task("popgym-RepeatPreviousEasy-v0", 100_000, 0.95),
    "RepeatFirstEasy": Task("popgym-RepeatFirstEasy-v0", 100_000, 0.95),
    "CountRecallEasy": Task("popgym-CountRecallEasy-v0", 100_000, 0.95),
    "CartPole without velocities": Task(masked_cart_pole, 100_000, 475),
}


def whole_episode(memory: StreamingXL | RMT) -> TransformerSpec:
    """Return the default core with a memory that defines the visible tokens itself."""
    return replace(gtrxl(), pattern=Full(), memory=memory)


def cores() -> dict[str, TransformerSpec]:
    """Return the cores by name: two layers of 64 features and GRU gates, like the default core."""
    recurrent = {name: core_of(name) for name in TECHNIQUES["recurrence"]}
    mixed = replace(gtrxl(), recurrence=GatedDeltaNet(), attention_layers=(1,))
    return {
        "XL": gtrxl(),
        "StreamingXL": whole_episode(StreamingXL(124)),
        "RMT": whole_episode(RMT(16)),
        "RATE": whole_episode(RATE(16)),
        **recurrent,
        "GatedDeltaNet, then XL": mixed,
    }


@dataclass(frozen=True)
class Run:
    """Result of one training run.

    Args:
        weights: number of parameters.
        state: bytes of the state of one environment.
        seconds: CPU time of the run, with its evaluations.
        curve: (environment steps, mean return) of each evaluation.
    """

    weights: int
    state: int
    seconds: float
    curve: list[tuple[int, float]]


def train(task: str, core: str, seed: int) -> Run:
    """Train and evaluate one agent."""
    chosen, start = TASKS[task], time.process_time()
    callback = EvaluationCallback(
        chosen.environments(), episodes=EPISODES, every_steps=chosen.steps // EVALUATIONS
    )
    env = chosen.environments(seed)
    agent = GTrXLPPO("MlpGTrXLPolicy", env, seed=seed, core=cores()[core], **FEWER_UPDATES)
    agent.learn(chosen.steps, callback=callback)
    curve = [(step, report.mean) for step, report in callback.reports.items()]
    weights = sum(parameter.numel() for parameter in agent.policy.parameters())
    return Run(weights, state_bytes(agent.policy.transformer), time.process_time() - start, curve)


@dataclass
class Cores:
    """Compare recurrent mixers and memories on tasks that need memory: returns, cost and size."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Names of the tasks."""
    only: tuple[str, ...] = ()
    """Names of the cores; default: all."""
    seeds: int = 1
    """Seeds of each core on each task, from 0."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-cores.jsonl")
    """Output file with all results; completed runs are not repeated."""

    def run(self) -> None:
        """Make missing runs and print a table for each task."""
        names = self.only or tuple(cores())
        for task in self.tasks:
            keys = {name: [f"{task}, {name}, seed {seed}" for seed in range(self.seeds)] for name in names}
            jobs = {
                key: partial(train, task, name, seed)
                for name, own in keys.items()
                for seed, key in enumerate(own)
            }
            results = run_missing(jobs, self.processes, self.output)
            runs = {name: [Run(**results[key]) for key in own] for name, own in keys.items()}
            Console(width=140).print(table(task, runs))


def table(task: str, runs: dict[str, list[Run]]) -> Table:
    """Return a table with a row for each core."""
    title = f"{task}, {TASKS[task].steps:,} steps"
    result = Table("core", "return at the end", "solved at", "CPU, s", "weights", "state, bytes", title=title)
    for row in rows(TASKS[task].solved, runs):
        result.add_row(*row)
    return result


def rows(solved: float, runs: dict[str, list[Run]]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row."""
    for name, own in runs.items():
        last = ", ".join(f"{run.curve[-1][1]:.2f}" for run in own)
        yield name, last, *cells(solved, own)


def cells(solved: float, own: Sequence[Run]) -> tuple[str, ...]:
    """Return the steps to solve, the cost and the sizes of the runs of one core."""
    reached: list[Any] = [next((step for step, mean in run.curve if mean >= solved), None) for run in own]
    steps = ", ".join("no" if step is None else f"{step:,}" for step in reached)
    seconds = sum(run.seconds for run in own) / len(own)
    return steps, f"{seconds:.0f}", f"{own[0].weights:,}", f"{own[0].state:,}"
