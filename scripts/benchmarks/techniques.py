"""Success and cost of each technique in the core of GTrXLPPO on the T-Maze."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gtrxl_agents import FEWER_UPDATES
from benchmarks.machine import fresh_processes, machine
from benchmarks.result_cache import SuccessCurve
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.gtrxl.core import gtrxl, resolve_core
from rlxf.attention import Full, RoPE, TransformerSpec
from rlxf.attention.kernels.base import PairwiseKernel
from rlxf.attention.patterns.window import limit_distance
from rlxf.attention.registry import TECHNIQUES
from rlxf.envs.make import make_vec_env
from rlxf.evaluation import EvaluationCallback

ENVS, LENGTH, STEPS, SEEDS = 32, 50, 150_000, 2
EVALUATIONS, EPISODES = 15, 200


@dataclass(frozen=True)
class Subject:
    """A core with one technique, or the error message that rejects it.

    Args:
        axis: axis of the technique.
        name: name of the technique.
        core: the core, if it is valid.
        refused: error message, if the core is invalid.
    """

    axis: str
    name: str
    core: TransformerSpec | None = None
    refused: str = ""


@dataclass(frozen=True)
class Trial(SuccessCurve):
    """Result of one training run.

    Args:
        axis: axis of the technique.
        name: name of the technique.
        seed: random seed.
        weights: number of parameters.
        seconds: CPU time of 1,000 steps, including evaluations.
        curve: (environment steps, success rate) of each evaluation.
    """

    axis: str
    name: str
    seed: int
    weights: int
    seconds: float
    curve: list[tuple[int, float]]


def subjects() -> Iterator[Subject]:
    """Yield the default core, then the core with each technique; `Cores` measures recurrences instead."""
    yield Subject("", "baseline", gtrxl())
    for axis, techniques in TECHNIQUES.items():
        if axis == "recurrence":
            continue
        default = type(getattr(gtrxl(), axis)).__name__
        yield from (subject(axis, name) for name in techniques if name != default)


def subject(axis: str, name: str) -> Subject:
    """Return the default core with one technique replaced."""
    try:
        core = replace(gtrxl(), **fitting(axis, TECHNIQUES[axis][name]()))
        return Subject(axis, name, resolve_core(core, None))
    except ValueError as error:
        return Subject(axis, name, refused=str(error))


def fitting(axis: str, technique: Any) -> dict[str, Any]:
    """Return the technique and the other techniques that it requires.

    A pattern is limited to the length of the memory; a memory that defines its own span has no pattern; a
    kernel that does not support the relative position of the core uses RoPE.
    """
    if axis == "pattern":
        return {axis: limit_distance(technique, gtrxl().pattern.max_distance)}
    if axis == "memory" and technique.covers(Full()):
        return {axis: technique, "pattern": Full()}
    pairs = axis != "kernel" or isinstance(technique, PairwiseKernel)
    return {axis: technique} if pairs else {axis: technique, "position": RoPE()}


def train(subject: Subject, seed: int) -> Trial:
    """Train one agent."""
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
    """Train with each technique; print a line for each run, and the table at the end.

    Completed runs are lines of the output file and are not repeated.
    """
    chosen = [one for one in subjects() if not only or one.name in (*only, "baseline")]
    output.parent.mkdir(parents=True, exist_ok=True)
    done = kept(output)
    requested = [(one, seed) for one in chosen if one.core for seed in range(SEEDS)]
    missing = [(one, seed) for one, seed in requested if (one.axis, one.name, seed) not in done]
    for trial in finished(missing, processes):
        with open(output, "a") as file:
            file.write(json.dumps({"machine": machine(), "trial": asdict(trial)}) + "\n")
        Console().print(f"{trial.axis} {trial.name} seed {trial.seed}: solved at {trial.solved_at}")
    done = kept(output)
    results = [done[one.axis, one.name, seed] for one, seed in requested]
    Console(width=140).print(table(chosen, results), f"curves: {output}")


def kept(output: Path) -> dict[tuple[str, str, int], Trial]:
    """Read the completed runs of the output file by axis, technique and seed."""
    lines = output.read_text().splitlines() if output.exists() else []
    trials = [Trial(**json.loads(line)["trial"]) for line in lines]
    return {(trial.axis, trial.name, trial.seed): trial for trial in trials}


def finished(jobs: list[tuple[Subject, int]], processes: int) -> Iterator[Trial]:
    """Yield the runs in order, with one thread each."""
    with fresh_processes(processes) as pool:
        running = [pool.submit(train, one, seed) for one, seed in jobs]
        for each in running:
            yield each.result()


def table(chosen: list[Subject], trials: list[Trial]) -> Table:
    """Return a table with success and cost, or the error message, of each technique."""
    title = f"T-Maze of {LENGTH}, {STEPS:,} steps; cost: CPU time relative to the default core"
    result = Table("axis", "technique", "solved at", "success at the end", "weights", "cost", title=title)
    for row in rows(chosen, trials):
        result.add_row(*row)
    return result


def rows(chosen: list[Subject], trials: list[Trial]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row."""
    default = mean(trial.seconds for trial in trials if not trial.axis)
    for one in chosen:
        own = [trial for trial in trials if (trial.axis, trial.name) == (one.axis, one.name)]
        yield (
            one.axis,
            one.name,
            *(cells(own, default) if own else (one.refused or "not measured", "", "", "")),
        )


def cells(own: list[Trial], default: float) -> tuple[str, ...]:
    """Return the cells of the runs of one technique."""
    solved = ", ".join("no" if trial.solved_at is None else f"{trial.solved_at:,}" for trial in own)
    last = ", ".join(f"{trial.curve[-1][1]:.2f}" for trial in own)
    return solved, last, f"{own[0].weights:,}", f"{mean(trial.seconds for trial in own) / default:.2f}"
