"""Update time and returns of Decision Transformers with long contexts and sparse patterns."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.result_cache import run_missing
from benchmarks.update_clock import UpdateClock
from rlxf import DecisionTransformer, evaluate
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.attention import BigBird, Full, Window
from rlxf.attention.patterns.base import Pattern
from rlxf.attention.sparse import plan
from rlxf.data import load_trajectories
from rlxf.evaluation import Report, compare
from rlxf.training import linear

PATTERNS: dict[str, Pattern] = {
    "all pairs": Full(),
    "Window(60)": Window(60),
    "BigBird": BigBird(block=30, window=3, random=2, global_blocks=1),
}
"""Patterns by name. A step has 3 tokens, so the window has 20 steps and a block 10 steps."""
DENSE, DENSE_UPDATES = "all pairs, with masked ones", 20
"""Name of the run with dense attention over all pairs, and its number of timed updates."""


@dataclass(frozen=True)
class Run:
    """Result of one agent.

    Args:
        pattern: name of the pattern.
        seed: random seed.
        milliseconds: median CPU time of an update with one thread.
        returns: returns of the evaluation episodes.
        lengths: lengths of these episodes, in steps.
    """

    pattern: str
    seed: int
    milliseconds: float
    returns: list[float]
    lengths: list[int]


@dataclass
class Context:
    """Update time and returns of a Decision Transformer with a context of 300 steps, by pattern.

    The agents have the small setting: width 64, 2 layers, 1 head. The dataset is read from
    MINARI_DATASETS_PATH; Hopper requires the extra mujoco. Times are CPU times, so other processes on the
    machine matter little. Completed agents are lines of the output file and are not repeated.
    """

    dataset: str = "rlxf/hopper/medium-replay-like-v0"
    """Minari id."""
    context_length: int = 300
    """Context length K in steps, with three tokens each."""
    batch_size: int = 16
    """Windows per update."""
    updates: int = 2000
    """Updates of each agent."""
    seeds: int = 1
    """Agents of each pattern."""
    episodes: int = 50
    """Episodes per evaluation. The target return is the largest return of the data."""
    processes: int = 2
    """Parallel processes, with one thread each."""
    output: Path = Path("runs/bench-context.jsonl")
    """Output file with a line for each agent."""

    def run(self) -> None:
        """Train and evaluate missing agents, write each result, and print the tables."""
        jobs: dict[str, Callable[[], Run]] = {
            self.key(name, seed): partial(self.learn, name, seed)
            for seed in range(self.seeds)
            for name in PATTERNS
        }
        jobs[f"{self.key(DENSE, 0)}, {DENSE_UPDATES} of them"] = self.at_once
        runs = [Run(**run) for run in run_missing(jobs, self.processes, self.output).values()]
        Console().print(speeds(runs), compare(reports(runs), f"{self.dataset}, all seeds", "pattern"))
        Console().print(f"numbers: {self.output}")

    def key(self, name: str, seed: int) -> str:
        """Return the key of an agent in the output file."""
        sizes = f"K {self.context_length}, batch {self.batch_size}, {self.updates} updates"
        return f"{self.dataset}, {name}, {sizes}, {self.episodes} episodes, seed {seed}"

    def agent(self, name: str, seed: int) -> DecisionTransformer:
        """Build an untrained agent."""
        return DecisionTransformer(
            self.dataset,
            core=replace(decision_transformer(width=64, layers=2), pattern=PATTERNS[name]),
            context_length=self.context_length,
            batch_size=self.batch_size,
            learning_rate=linear(1e-3, 1e-4),
            return_scale=1000.0,
            seed=seed,
        )

    def at_once(self) -> Run:
        """Time updates with dense attention, which also computes masked pairs, as is default."""
        default, plan.MIN_SPARSE_PAIRS = plan.MIN_SPARSE_PAIRS, 2**62
        clock = UpdateClock(time.process_time)
        self.agent("all pairs", 0).learn(DENSE_UPDATES, callback=clock)
        plan.MIN_SPARSE_PAIRS = default
        return Run(DENSE, 0, 1000 * median(clock.durations), [], [])

    def learn(self, name: str, seed: int) -> Run:
        """Train and evaluate one agent."""
        agent, clock = self.agent(name, seed), UpdateClock(time.process_time)
        agent.learn(self.updates, callback=clock)
        target = float(load_trajectories(self.dataset).returns.max())
        report = evaluate(agent, agent.make_env(self.episodes), self.episodes, target_returns=[target]).first
        return Run(
            name, seed, 1000 * median(clock.durations), report.returns.tolist(), report.lengths.tolist()
        )


def speeds(runs: list[Run]) -> Table:
    """Return the table of update times by pattern."""
    references = "all pairs", DENSE
    result = Table(
        "pattern",
        "ms per update",
        *(f"speedup over {one}" for one in references),
        title="CPU time, one thread",
    )
    names = dict.fromkeys(run.pattern for run in runs)
    medians = {name: median(run.milliseconds for run in runs if run.pattern == name) for name in names}
    for name, milliseconds in medians.items():
        result.add_row(
            name, f"{milliseconds:.0f}", *(f"{medians[one] / milliseconds:.2f}" for one in references)
        )
    return result


def reports(runs: list[Run]) -> dict[str, Report]:
    """Pool the episodes of all seeds of each pattern."""
    results = {}
    for name in PATTERNS:
        own = [run for run in runs if run.pattern == name]
        returns, lengths = (
            np.concatenate([getattr(run, what) for run in own]) for what in ("returns", "lengths")
        )
        results[name] = Report(returns, lengths)
    return results
