"""Returns, cost and size of recurrent mixers and memories in GTrXLPPO, on tasks that need memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import gymnasium
from rich.console import Console
from rich.table import Table
from stable_baselines3.common.env_util import make_vec_env as make_sb3_env
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.defaults import masked_cart_pole
from benchmarks.gtrxl_agents import FEWER_UPDATES
from benchmarks.mixers import core_of, state_bytes
from benchmarks.result_cache import run_missing
from rlxf.agents.gtrxl import GTrXLPPO, gtrxl
from rlxf.attention import RATE, RMT, Full, GatedDeltaNet, StreamingXL, TransformerSpec
from rlxf.attention.registry import TECHNIQUES
from rlxf.envs.make import make_vec_env
from rlxf.evaluation import EvaluationCallback

ENVS, EVALUATIONS, EPISODES = 32, 10, 100
SETTINGS: dict[str, Any] = FEWER_UPDATES | {"n_steps": 128, "segment_length": 128}
"""Settings of all cores. Gradients stop at the start of a segment, so a segment has to contain the steps from
an observation to the action that depends on it. In all tasks but CartPole, episodes have at most 64 steps."""


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
    "TMaze 50": Task("rlxf/TMaze-v0", 200_000, 0.95),
    "RepeatPreviousEasy": Task("popgym-RepeatPreviousEasy-v0", 200_000, 0.95),
    "RepeatFirstEasy": Task("popgym-RepeatFirstEasy-v0", 100_000, 0.95),
    "CountRecallEasy": Task("popgym-CountRecallEasy-v0", 200_000, 0.95),
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
        task: name of the task.
        core: name of the core.
        seed: random seed.
        weights: number of parameters.
        state: bytes of the state of one environment.
        seconds: CPU time of the run, with its evaluations.
        curve: (environment steps, mean return) of each evaluation.
    """

    task: str
    core: str
    seed: int
    weights: int
    state: int
    seconds: float
    curve: list[tuple[int, float]]

    @property
    def result(self) -> str:
        """Mean return of the last evaluation, and the thousands of steps after which the task was solved."""
        solved = TASKS[self.task].solved
        step = next((step for step, value in self.curve if value >= solved), None)
        return f"{self.curve[-1][1]:.2f}" + ("" if step is None else f" ({step / 1000:.0f}k)")


def train(task: str, core: str, seed: int) -> Run:
    """Train and evaluate one agent."""
    chosen, start = TASKS[task], time.process_time()
    callback = EvaluationCallback(
        chosen.environments(), episodes=EPISODES, every_steps=chosen.steps // EVALUATIONS
    )
    env = chosen.environments(seed)
    agent = GTrXLPPO("MlpGTrXLPolicy", env, seed=seed, core=cores()[core], **SETTINGS)
    agent.learn(chosen.steps, callback=callback)
    curve = [(step, report.mean) for step, report in callback.reports.items()]
    weights = sum(parameter.numel() for parameter in agent.policy.parameters())
    state = state_bytes(agent.policy.transformer)
    return Run(task, core, seed, weights, state, time.process_time() - start, curve)


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
        """Make missing runs and print the table."""
        names = self.only or tuple(cores())
        jobs = {
            f"{task}, {name}, seed {seed}": partial(train, task, name, seed)
            for task in self.tasks
            for name in names
            for seed in range(self.seeds)
        }
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        Console(width=200).print(table(runs))


def table(runs: Sequence[Run]) -> Table:
    """Return a table with a row for each core."""
    tasks = dict.fromkeys(run.task for run in runs)
    result = Table("core", *tasks, "CPU, s", "weights", "state, bytes")
    for row in rows(runs):
        result.add_row(*row)
    return result


def rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each core: results by task, mean CPU time of a run, weights and bytes of the state.

    Weights and bytes are those of the first task.
    """
    tasks = dict.fromkeys(run.task for run in runs)
    for core in dict.fromkeys(run.core for run in runs):
        own = [run for run in runs if run.core == core]
        results = (", ".join(run.result for run in own if run.task == task) for task in tasks)
        yield (
            core,
            *results,
            f"{mean(run.seconds for run in own):.0f}",
            f"{own[0].weights:,}",
            f"{own[0].state:,}",
        )
