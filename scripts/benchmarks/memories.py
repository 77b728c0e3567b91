"""Which memory reaches a hint that is farther back than tokens are remembered by themselves, at what cost."""

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
from benchmarks.distilling import walked
from benchmarks.kept import made
from benchmarks.ours import FEWER_UPDATES
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.gtrxl.core import gtrxl
from rlxf.agents.gtrxl.past import steps_that_count
from rlxf.attention import KNN, Compressive, Full, TransformerSpec
from rlxf.envs.make import make_vec_env
from rlxf.envs.tmaze_rules import PenaltyRule
from rlxf.evaluation import EvaluationCallback

ENVS, SOLVED, RATIO, TOP = 32, 0.95, 4, 32
CALLS = 300
"""Of ``predict`` that are timed."""


@dataclass(frozen=True)
class Run:
    """One agent.

    Args:
        memory: its name.
        seed: of everything.
        training: milliseconds of processor time for a step of an environment, rollout and updates.
        acting: the same of ``predict`` for one environment, the median.
        carried: bytes for each environment that acts: keys and values of what is remembered.
        remembered: bytes for each environment of the state that a segment begins with: hidden states.
        curve: (environment steps, success) of each evaluation.
    """

    memory: str
    seed: int
    training: float
    acting: float
    carried: int
    remembered: int
    curve: list[tuple[int, float]]

    @property
    def solved_at(self) -> int | None:
        """Steps before the first evaluation with a success of at least 0.95; None if there is none."""
        return next((step for step, success in self.curve if success >= SOLVED), None)


@dataclass
class Memories:
    """GTrXLPPO with XL, Compressive and KNN memory on a T-Maze four times as long as what is remembered raw.

    At the junction the hint is L steps back. Every token sees M steps back in each layer, wherever it stands
    in its segment: the pattern is Window(M + 1). So the last of N layers of XL knows of N M steps, here of
    32, and the hint is out of its reach by any way through layers and segments; nor can it be handed on by
    actions, which are part of the tokens: who takes another step than the right one never stands in an
    arm in time. What is left is to guess: a success of 0.5. Compressive sees blocks of 4 steps as one, KNN
    the 32 nearest keys in one layer, both as far back as the hint, beside the same M raw steps. Sizes for
    which this does not hold are refused.

    A run that is done is a line of the output and is not made again. Processor time counts: other work on the
    machine matters little.
    """

    memories: tuple[str, ...] = ("XL", "Compressive", "KNN")
    """Out of these three."""
    length: int = 16
    """Steps M that each of them remembers raw."""
    corridor: int = 64
    """Steps L from the hint to the junction."""
    penalty_rule: PenaltyRule = "step"
    """step tells of each step whether it was good, so that all learn to walk; schedule is the paper's."""
    layers: int = 2
    """Layers N."""
    steps: int = 250_000
    """Environment steps of each run. With a memory of 128, corridors of 50 and 100 take 60,000 to 220,000."""
    seeds: int = 5
    """Runs of each."""
    evaluations: int = 20
    """Of each run, evenly spread."""
    episodes: int = 200
    """Of an evaluation."""
    processes: int = 1
    """Runs at a time, one thread each."""
    output: Path = Path("runs/bench-memories.jsonl")
    """Where to write each run, curve and all."""

    def __post_init__(self) -> None:
        if unknown := set(self.memories) - {"XL", "Compressive", "KNN"}:
            raise ValueError(f"memories must be among XL, Compressive and KNN, got {sorted(unknown)}")
        if (reach := steps_that_count(self.core("XL"))) >= self.corridor:
            raise ValueError(
                f"XL must not reach the hint: {self.layers} layers of {self.length} steps reach {reach} "
                f"back, and the corridor is {self.corridor}; use a longer one"
            )

    def run(self) -> None:
        """Train what is missing, print the table, write each run as it ends."""
        jobs: dict[str, Callable[[], Run]] = {
            self.key(name, seed): partial(self.train, name, seed)
            for seed in range(self.seeds)
            for name in self.memories
        }
        runs = [Run(**run) for run in made(jobs, self.processes, self.output).values()]
        Console(width=140).print(self.table(runs), f"curves: {self.output}")

    def key(self, name: str, seed: int) -> str:
        """What tells a run from others."""
        sizes = f"M {self.length}, corridor {self.corridor}, {self.layers} layers, {self.steps} steps"
        task = f"penalty by {self.penalty_rule}, {self.evaluations} x {self.episodes} episodes"
        return f"{name}, {sizes}, {task}, seed {seed}"

    def core(self, name: str) -> TransformerSpec:
        """The usual core, with another memory of as many raw tokens, which reaches the hint."""
        core, far = gtrxl(self.length, layers=self.layers), max(1, self.corridor - self.length)
        if name == "Compressive":
            memory = Compressive(recent=self.length, compressed=-(-far // RATIO), ratio=RATIO)
            return replace(core, memory=memory, pattern=Full())
        if name == "KNN":
            return replace(core, memory=KNN(self.length, far, min(TOP, far)))
        return core

    def train(self, name: str, seed: int) -> Run:
        """One run from its first to its last step."""
        task = {"corridor_length": self.corridor, "penalty_rule": self.penalty_rule}
        env = make_vec_env("rlxf/TMaze-v0", ENVS, seed, env_kwargs=task)
        tests = make_vec_env("rlxf/TMaze-v0", ENVS, env_kwargs=task)
        agent = GTrXLPPO("MlpGTrXLPolicy", env, seed=seed, core=self.core(name), **FEWER_UPDATES)
        callback = TimedEvaluations(tests, self.episodes, self.steps // self.evaluations)
        start = time.process_time()
        agent.learn(self.steps, callback=callback)
        training = 1000 * (time.process_time() - start - callback.seconds) / agent.num_timesteps
        step = walked(agent, make_vec_env("rlxf/TMaze-v0", 1, seed, env_kwargs=task))
        acting = 1000 * median(processor_seconds(step) for _ in range(CALLS))
        curve = [(step, report.success_rate or 0.0) for step, report in callback.reports.items()]
        carried = bytes_of_a_row(agent.policy.begin)
        remembered = bytes_of_a_row(agent.policy.transformer.initial_state)
        return Run(name, seed, training, acting, carried, remembered, curve)

    def table(self, runs: list[Run]) -> Table:
        """A line for each memory."""
        result = Table(
            "memory",
            "looks back at most",
            "seeds solved",
            "solved at",
            "success at the end",
            "ms a step, training",
            "ms, predict",
            "bytes each acts with",
            "bytes of its state",
            title=f"T-Maze of {self.corridor}, penalty by {self.penalty_rule}, {self.length} raw tokens, "
            f"{self.steps:,} steps",
        )
        for name in self.memories:
            result.add_row(name, f"{steps_that_count(self.core(name))}", *cells(runs, name))
        return result


class TimedEvaluations(EvaluationCallback):
    """An `EvaluationCallback` that knows how many seconds of the processor it took."""

    seconds = 0.0

    def act(self) -> None:
        """See `EvaluationCallback`."""
        self.seconds += processor_seconds(super().act)


def cells(runs: list[Run], name: str) -> list[str]:
    """What the runs of one memory showed."""
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
    """What one more environment adds to what ``begin`` makes for so many of them."""
    return bytes_in(begin(2)) - bytes_in(begin(1))


def bytes_in(value: Any) -> int:
    """Of all tensors in dataclasses, lists and tuples."""
    if isinstance(value, Tensor):
        return value.nbytes
    if is_dataclass(value):
        return sum(bytes_in(getattr(value, field.name)) for field in fields(value))
    return sum(map(bytes_in, value)) if isinstance(value, list | tuple) else 0
