"""GTrXL learns a task; a Decision Transformer learns from what was recorded of that, and is asked."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import tyro
from demonstration import asking, remembering
from rich.console import Console
from rich.table import Table

from rlxf import DecisionTransformer, GTrXLPPO, evaluate
from rlxf.evaluation import Report, TargetSweep, compare
from rlxf.training import RunFolder

WANTED = 0.95
NEAR = 0.1
EPISODES = 200
ASKED_EPISODES = 100
RECORDED = 1_500
STAGES = 20
console = Console(highlight=False, markup=False, width=110)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train GTrXL on a T-Maze, record it at all stages, and ask a Decision Transformer for returns.

    The first observation tells whether the goal is up or down. Fifty steps later, at the junction, the
    agent has to remember it. Guessing succeeds half of the time. GTrXL learns this with default settings.
    Stages of its learning, from the first quarter on, are then recorded into a Minari dataset: as they play,
    and with 2% of their actions drawn at random. A Decision Transformer that learns from it is asked for five
    returns: 1, the goal's arm; and -0.2, -0.4, -0.6 and -0.8, had by a wrong step on the way, the earlier the
    less.

    The run folder gets gtrxl and decision_transformer, each with TensorBoard events, log (progress.csv),
    configuration (config.json) and agent (checkpoint.zip); the curve of the first (curve.png), what the
    second achieved of what was asked (asked.png); and the dataset (datasets). The exit status is 1 if GTrXL
    succeeds in fewer than 95% of its episodes, or a mean return is farther than 0.1 from what was asked.

    Example: scripts/demo.sh --seed 1
    """

    steps: int = 200_000
    """Environment steps to train GTrXL for, over 32 environments side by side."""
    updates: int = 4_000
    """Updates of the Decision Transformer."""
    seed: int = 0
    """Of weights, actions, minibatches, environments and windows."""
    run: Path = Path("runs/demo")
    """Folder of the run. If it exists, the next free of runs/demo-2, runs/demo-3 ... is taken."""


def main(options: Demo) -> int:
    """Run the demonstration; gives the exit status."""
    # So small networks compute faster on one thread than torch can share them out.
    torch.set_num_threads(1)
    started = time.monotonic()
    folder = next(path for path in numbered(options.run) if not path.exists())
    console.print(f"{remembering.TASK}: a corridor of 50 steps. Run folder: {folder}")
    asking.keep_datasets_in(folder / "datasets")
    reports, first = remember(folder, options)
    reports["what was recorded"] = asking.record(remembering.load_stages(first), RECORDED, options.seed)
    sweep = ask(folder, options)
    console.print(table(reports, sweep, options, (time.monotonic() - started) / 60))
    show_where(folder)
    return verdict(reports["GTrXL"], sweep)


def numbered(path: Path) -> Iterator[Path]:
    """runs/demo, runs/demo-2, runs/demo-3 ..."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def remember(folder: Path, options: Demo) -> tuple[dict[str, Report], RunFolder]:
    """First half: what GTrXL reaches, with its own memory and with another's, and its run."""
    run = remembering.make_run(folder / "gtrxl", options.steps, options.seed)
    agent, curve = remembering.train(run, STAGES, EPISODES // 2)
    task = remembering.TASK
    reports = {
        "GTrXL": evaluate(GTrXLPPO.load(run.checkpoint), task, EPISODES, logger=agent.logger),
        "  memories exchanged half-way": evaluate(remembering.Exchanged(agent), task, EPISODES),
    }
    agent.logger.close()
    remembering.draw(run.path, curve, folder / "curve.png")
    for scene in remembering.scenes(agent):
        console.print(scene)
    return reports, run


def ask(folder: Path, options: Demo) -> TargetSweep:
    """Second half: what the Decision Transformer achieves of what it is asked for."""
    run = asking.make_run(folder / "decision_transformer", options.updates, options.seed)
    logger = asking.train(run).logger
    agent = DecisionTransformer.load(run.checkpoint)
    sweep = evaluate(
        agent, episodes=ASKED_EPISODES, target_returns=asking.TARGETS, n_envs=ASKED_EPISODES, logger=logger
    )
    logger.close()
    sweep.plot(folder / "asked.png")
    return sweep


def table(reports: dict[str, Report], sweep: TargetSweep, options: Demo, minutes: float) -> Table:
    """What both agents reached, and with how much."""
    asked = {
        f"Decision Transformer, asked for {target:g}": report for target, report in sweep.reports.items()
    }
    found = compare(reports | asked, "T-Maze, corridor of 50 steps", "agent")
    correlation = "undefined" if sweep.spearman is None else f"{sweep.spearman:.2f}"
    found.caption = (
        f"{options.steps:,} environment steps, {options.updates:,} updates, {minutes:.1f} minutes.\n"
        f"Spearman's correlation of asked and achieved: {correlation}"
    )
    return found


def show_where(folder: Path) -> None:
    """Say where to look."""
    console.print(f"Curve: {folder / 'curve.png'}. Asked and achieved: {folder / 'asked.png'}")
    console.print(f"More: .venv/bin/tensorboard --logdir {folder}")


def verdict(learned: Report, sweep: TargetSweep) -> int:
    """0 if all that was promised was reached, else 1; says what was missed."""
    missed = [*too_low(learned), *too_far(sweep)]
    for line in missed:
        console.print(f"FAILED: {line}", style="red")
    if not missed:
        console.print("GTrXL solved the task; the Decision Transformer did as it was asked.", style="green")
    return int(bool(missed))


def too_low(learned: Report) -> Iterator[str]:
    """A line if GTrXL failed."""
    rate = learned.success_rate or 0.0
    if rate < WANTED:
        yield f"GTrXL's success rate {rate:.1%}, wanted at least {WANTED:.0%}"


def too_far(sweep: TargetSweep) -> Iterator[str]:
    """A line for each target that was missed."""
    for target, report in sweep.reports.items():
        if abs(report.mean - target) > NEAR:
            yield f"asked for {target:g}, the Decision Transformer achieved {report.mean:.2f} on average"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Demo, prog="scripts/demo.sh")))
