"""Which technique learns what, at what cost: the T-Maze with each of them in GTrXLPPO's core."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import fresh_processes, machine
from benchmarks.ours import FEWER_UPDATES
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.gtrxl.core import gtrxl, resolve_core
from rlxf.attention import Compressive, Full, RoPE, TransformerSpec
from rlxf.attention.kernels.base import PairwiseKernel
from rlxf.attention.patterns.window import bounded
from rlxf.attention.techniques import TECHNIQUES
from rlxf.envs.make import make_vec_env
from rlxf.evaluation import EvaluationCallback

ENVS, LENGTH, STEPS, SEEDS = 32, 50, 150_000, 2
EVALUATIONS, EPISODES, SOLVED = 15, 200, 0.95


@dataclass(frozen=True)
class Subject:
    """A technique in the core, or the sentence that refuses it.

    Args:
        axis: its axis.
        name: its name.
        core: the core, if the agent takes it.
        refused: why it does not.
    """

    axis: str
    name: str
    core: TransformerSpec | None = None
    refused: str = ""


@dataclass(frozen=True)
class Trial:
    """One run.

    Args:
        axis: the technique's axis.
        name: its name.
        seed: of everything.
        weights: numbers that are trained.
        seconds: processor time for 1,000 steps, evaluations included.
        curve: (environment steps, success) of each evaluation.
    """

    axis: str
    name: str
    seed: int
    weights: int
    seconds: float
    curve: list[tuple[int, float]]

    @property
    def solved_at(self) -> int | None:
        """Steps before the first evaluation with a success of at least 0.95; None if there is none."""
        return next((step for step, success in self.curve if success >= SOLVED), None)


def subjects() -> Iterator[Subject]:
    """The core as it is, then each technique in its place."""
    yield Subject("", "as it is", gtrxl())
    for axis, techniques in TECHNIQUES.items():
        usual = type(getattr(gtrxl(), axis)).__name__
        yield from (subject(axis, name) for name in techniques if name != usual)


def subject(axis: str, name: str) -> Subject:
    """The core with a technique in the place of what it has."""
    try:
        core = replace(gtrxl(), **fitting(axis, TECHNIQUES[axis][name]()))
        return Subject(axis, name, resolve_core(core, None))
    except ValueError as error:
        return Subject(axis, name, refused=str(error))


def fitting(axis: str, technique: Any) -> dict[str, Any]:
    """The technique, and what else it takes.

    A pattern sees no farther than is remembered; a memory that decides that itself has none; a kernel that
    does not take the core's position has RoPE.
    """
    if axis == "pattern":
        return {axis: bounded(technique, gtrxl().pattern.reach)}
    if isinstance(technique, Compressive):
        return {axis: technique, "pattern": Full()}
    pairs = axis != "kernel" or isinstance(technique, PairwiseKernel)
    return {axis: technique} if pairs else {axis: technique, "position": RoPE()}


def train(subject: Subject, seed: int) -> Trial:
    """One run from its first to its last step."""
    env = make_vec_env("rlxf/TMaze-v0", ENVS, seed, env_kwargs={"corridor_length": LENGTH})
    tests = make_vec_env("rlxf/TMaze-v0", ENVS, env_kwargs={"corridor_length": LENGTH})
    callback = EvaluationCallback(tests, episodes=EPISODES, every_steps=STEPS // EVALUATIONS)
    agent = GTrXLPPO("MlpGTrXLPolicy", env, seed=seed, core=subject.core, **FEWER_UPDATES)
    start = time.process_time()
    agent.learn(STEPS, callback=callback)
    seconds = (time.process_time() - start) * 1000 / STEPS
    weights = sum(parameter.numel() for parameter in agent.policy.parameters())
    curve = [(step, report.success_rate or 0.0) for step, report in callback.reports.items()]
    return Trial(subject.axis, subject.name, seed, weights, seconds, curve)


def learn_with_each(only: tuple[str, ...], processes: int, output: Path) -> None:
    """Train with each technique, print a line as each run ends and the table at the end.

    A run that is done is a line of the output, curve and all, and is not made again.
    """
    chosen = [one for one in subjects() if not only or one.name in (*only, "as it is")]
    output.parent.mkdir(parents=True, exist_ok=True)
    done = kept(output)
    wanted = [(one, seed) for one in chosen if one.core for seed in range(SEEDS)]
    missing = [(one, seed) for one, seed in wanted if (one.axis, one.name, seed) not in done]
    for trial in finished(missing, processes):
        with open(output, "a") as file:
            file.write(json.dumps({"machine": machine(), "trial": asdict(trial)}) + "\n")
        Console().print(f"{trial.axis} {trial.name} seed {trial.seed}: solved at {trial.solved_at}")
    done = kept(output)
    found = [done[one.axis, one.name, seed] for one, seed in wanted]
    Console(width=140).print(table(chosen, found), f"curves: {output}")


def kept(output: Path) -> dict[tuple[str, str, int], Trial]:
    """What is in the output: technique and seed -> what came of it."""
    lines = output.read_text().splitlines() if output.exists() else []
    trials = [Trial(**json.loads(line)["trial"]) for line in lines]
    return {(trial.axis, trial.name, trial.seed): trial for trial in trials}


def finished(jobs: list[tuple[Subject, int]], processes: int) -> Iterator[Trial]:
    """The runs in order, one thread each."""
    with fresh_processes(processes) as pool:
        running = [pool.submit(train, one, seed) for one, seed in jobs]
        for each in running:
            yield each.result()


def table(chosen: list[Subject], trials: list[Trial]) -> Table:
    """A line for each technique: what was learned, what it cost, or why not."""
    title = f"T-Maze of {LENGTH}, {STEPS:,} steps; cost: processor time over that of the core as it is"
    result = Table("axis", "technique", "solved at", "success at the end", "weights", "cost", title=title)
    for row in rows(chosen, trials):
        result.add_row(*row)
    return result


def rows(chosen: list[Subject], trials: list[Trial]) -> Iterator[tuple[str, ...]]:
    """The cells of each line."""
    usual = mean(trial.seconds for trial in trials if not trial.axis)
    for one in chosen:
        own = [trial for trial in trials if (trial.axis, trial.name) == (one.axis, one.name)]
        yield one.axis, one.name, *(cells(own, usual) if own else (one.refused or "not measured", "", "", ""))


def cells(own: list[Trial], usual: float) -> tuple[str, ...]:
    """What the runs of one technique showed."""
    solved = ", ".join("no" if trial.solved_at is None else f"{trial.solved_at:,}" for trial in own)
    last = ", ".join(f"{trial.curve[-1][1]:.2f}" for trial in own)
    return solved, last, f"{own[0].weights:,}", f"{mean(trial.seconds for trial in own) / usual:.2f}"
