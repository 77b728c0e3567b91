"""A long context of a Decision Transformer: what a sparse pattern saves, and what it costs in returns."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.kept import made
from benchmarks.update_clock import UpdateClock
from rlxf import DecisionTransformer, evaluate
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.attention import BigBird, Full, Window, relation
from rlxf.attention.patterns.base import Pattern
from rlxf.envs.trajectories import load_trajectories
from rlxf.evaluation import Report, compare
from rlxf.training import linear

PATTERNS: dict[str, Pattern] = {
    "every pair": Full(),
    "Window(60)": Window(60),
    "BigBird": BigBird(block=30, window=3, random=2, global_blocks=1),
}
"""A step is 3 tokens: the window holds 20 steps, a block 10."""
AT_ONCE, CLOCKED = "every pair, hidden ones too", 20
"""What is timed, and for how many updates."""


@dataclass(frozen=True)
class Run:
    """One agent.

    Args:
        pattern: its name.
        seed: of everything.
        milliseconds: processor time of an update with one thread, the median.
        returns: of the evaluation's episodes.
        lengths: of the same, in steps.
    """

    pattern: str
    seed: int
    milliseconds: float
    returns: list[float]
    lengths: list[int]


@dataclass
class Context:
    """Time of an update and returns of a Decision Transformer with a context of 300 steps, by its pattern.

    The small setting: width 64, 2 layers, 1 head. The dataset is read from MINARI_DATASETS_PATH; Hopper needs
    the extra mujoco. Processor time counts: other work on the machine matters little. An agent that is done
    is a line of the output and is not made again.
    """

    dataset: str = "rlxf/hopper/medium-replay-like-v0"
    """Minari id."""
    context_length: int = 300
    """Steps K that the model sees, three tokens each."""
    batch_size: int = 16
    """Windows in an update."""
    updates: int = 2000
    """Updates of each agent."""
    seeds: int = 1
    """Agents of each pattern."""
    episodes: int = 50
    """Episodes of an evaluation. What is asked for is the largest return of the data."""
    processes: int = 2
    """Agents at a time, one thread each."""
    output: Path = Path("runs/bench-context.jsonl")
    """Where to write each agent's numbers."""

    def run(self) -> None:
        """Train and evaluate what is missing, print the tables, write each agent as it is done."""
        jobs: dict[str, Callable[[], Run]] = {
            self.key(name, seed): partial(self.learn, name, seed)
            for seed in range(self.seeds)
            for name in PATTERNS
        }
        jobs[f"{self.key(AT_ONCE, 0)}, {CLOCKED} of them"] = self.at_once
        runs = [Run(**run) for run in made(jobs, self.processes, self.output).values()]
        Console().print(speeds(runs), compare(reports(runs), f"{self.dataset}, all seeds", "pattern"))
        Console().print(f"numbers: {self.output}")

    def key(self, name: str, seed: int) -> str:
        """What tells an agent from others."""
        sizes = f"K {self.context_length}, batch {self.batch_size}, {self.updates} updates"
        return f"{self.dataset}, {name}, {sizes}, {self.episodes} episodes, seed {seed}"

    def agent(self, name: str, seed: int) -> DecisionTransformer:
        """One that has learned nothing."""
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
        """Some updates where nothing is gathered: pairs that are hidden are weighed, too, as is usual."""
        usual, relation.SMALL = relation.SMALL, 2**62
        clock = UpdateClock(time.process_time)
        self.agent("every pair", 0).learn(CLOCKED, callback=clock)
        relation.SMALL = usual
        return Run(AT_ONCE, 0, 1000 * median(clock.took), [], [])

    def learn(self, name: str, seed: int) -> Run:
        """One agent from its first update to its evaluation."""
        agent, clock = self.agent(name, seed), UpdateClock(time.process_time)
        agent.learn(self.updates, callback=clock)
        target = float(load_trajectories(self.dataset).returns.max())
        report = evaluate(agent, agent.make_env(self.episodes), self.episodes, target_returns=[target]).first
        return Run(name, seed, 1000 * median(clock.took), report.returns.tolist(), report.lengths.tolist())


def speeds(runs: list[Run]) -> Table:
    """What an update costs with each pattern."""
    beside = "every pair", AT_ONCE
    result = Table(
        "pattern",
        "ms an update",
        *(f"times as fast as {one}" for one in beside),
        title="processor time, one thread",
    )
    names = dict.fromkeys(run.pattern for run in runs)
    took = {name: median(run.milliseconds for run in runs if run.pattern == name) for name in names}
    for name, milliseconds in took.items():
        result.add_row(name, f"{milliseconds:.0f}", *(f"{took[one] / milliseconds:.2f}" for one in beside))
    return result


def reports(runs: list[Run]) -> dict[str, Report]:
    """The episodes of all seeds of each pattern."""
    found = {}
    for name in PATTERNS:
        own = [run for run in runs if run.pattern == name]
        returns, lengths = (
            np.concatenate([getattr(run, what) for run in own]) for what in ("returns", "lengths")
        )
        found[name] = Report(returns, lengths)
    return found
