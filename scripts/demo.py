"""Demo: GTrXL learns a T-Maze; a Decision Transformer learns from its episodes and follows target returns."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import tyro
from demonstration import decision_transformer, gtrxl
from rich.console import Console
from rich.table import Table

from rlxf import DecisionTransformer, GTrXLPPO, evaluate
from rlxf.evaluation import Report, TargetSweep, compare
from rlxf.training import RunFolder

REQUIRED_SUCCESS = 0.95
TOLERANCE = 0.1
EPISODES = 200
TARGET_EPISODES = 100
RECORDED_EPISODES = 1_500
STAGES = 20
console = Console(highlight=False, markup=False, width=110)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Train GTrXL on a T-Maze, record a dataset with it, and train a Decision Transformer on the dataset.

    The first observation shows whether the goal is up or down. The agent must remember it for fifty steps, up
    to the junction. Guessing succeeds in half of the episodes. GTrXL learns this task with default settings.
    Checkpoints of its training, after the first quarter, then record a Minari dataset: without exploration,
    and with 2% random actions. A Decision Transformer is trained on this dataset and evaluated with five
    target returns: 1 for the arm of the goal; and -0.2, -0.4, -0.6 and -0.8, which result from a wrong step
    in the corridor, where an earlier step gives a lower return.

    The run folder contains gtrxl and decision_transformer, each with TensorBoard events, log (progress.csv),
    configuration (config.json) and agent (checkpoint.zip); the learning curve of GTrXL (curve.png); the
    target and achieved returns of the Decision Transformer (target_returns.png); and the dataset (datasets).
    The exit status is 1 if the success rate of GTrXL is below 95%, or if a mean return differs from its
    target by more than 0.1.

    Example: scripts/demo.sh --seed 1
    """

    steps: int = 200_000
    """Environment steps of the training of GTrXL, in 32 parallel environments."""
    updates: int = 4_000
    """Gradient updates of the Decision Transformer."""
    seed: int = 0
    """Random seed of weights, actions, minibatches, environments and windows."""
    run: Path = Path("runs/demo")
    """Folder of the run. If it exists, the first free one of runs/demo-2, runs/demo-3 ... is used."""


def main(options: Demo) -> int:
    """Run the demo and return the exit status."""
    # For networks of this size, a single thread is faster.
    torch.set_num_threads(1)
    start = time.monotonic()
    folder = next(path for path in numbered(options.run) if not path.exists())
    console.print(f"{gtrxl.TASK}: a corridor of 50 steps. Run folder: {folder}")
    decision_transformer.set_dataset_folder(folder / "datasets")
    reports, first = train_gtrxl(folder, options)
    reports["what was recorded"] = decision_transformer.record(
        gtrxl.load_stages(first), RECORDED_EPISODES, options.seed
    )
    sweep = train_decision_transformer(folder, options)
    console.print(table(reports, sweep, options, (time.monotonic() - start) / 60))
    print_paths(folder)
    return verdict(reports["GTrXL"], sweep)


def numbered(path: Path) -> Iterator[Path]:
    """Yield runs/demo, runs/demo-2, runs/demo-3 ..."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def train_gtrxl(folder: Path, options: Demo) -> tuple[dict[str, Report], RunFolder]:
    """Train GTrXL; return evaluations with its own and with exchanged memory, and its run folder."""
    run = gtrxl.make_run(folder / "gtrxl", options.steps, options.seed)
    agent, curve = gtrxl.train(run, STAGES, EPISODES // 2)
    task = gtrxl.TASK
    reports = {
        "GTrXL": evaluate(GTrXLPPO.load(run.final_checkpoint), task, EPISODES, logger=agent.logger),
        "  memories swapped halfway": evaluate(gtrxl.Exchanged(agent), task, EPISODES),
    }
    agent.logger.close()
    gtrxl.draw(run.path, curve, folder / "curve.png")
    for scene in gtrxl.scenes(agent):
        console.print(scene)
    return reports, run


def train_decision_transformer(folder: Path, options: Demo) -> TargetSweep:
    """Train the Decision Transformer; return its evaluation over target returns."""
    run = decision_transformer.create_run(folder / "decision_transformer", options.updates, options.seed)
    logger = decision_transformer.train(run).logger
    agent = DecisionTransformer.load(run.final_checkpoint)
    sweep = evaluate(
        agent,
        episodes=TARGET_EPISODES,
        target_returns=decision_transformer.TARGETS,
        n_envs=TARGET_EPISODES,
        logger=logger,
    )
    logger.close()
    sweep.plot(folder / "target_returns.png")
    return sweep


def table(reports: dict[str, Report], sweep: TargetSweep, options: Demo, minutes: float) -> Table:
    """Return the table of the results of both agents."""
    targets = {f"Decision Transformer, target {target:g}": report for target, report in sweep.reports.items()}
    result = compare(reports | targets, "T-Maze, corridor of 50 steps", "agent")
    correlation = "undefined" if sweep.spearman is None else f"{sweep.spearman:.2f}"
    scores = "" if result.caption is None else f"\n{result.caption}"
    result.caption = (
        f"{options.steps:,} environment steps, {options.updates:,} updates, {minutes:.1f} minutes.\n"
        f"Spearman correlation of target and achieved returns: {correlation}{scores}"
    )
    return result


def print_paths(folder: Path) -> None:
    """Print the paths of the results."""
    console.print(
        f"Curve: {folder / 'curve.png'}. Target and achieved returns: {folder / 'target_returns.png'}"
    )
    console.print(f"More: .venv/bin/tensorboard --logdir {folder}")


def verdict(learned: Report, sweep: TargetSweep) -> int:
    """Return the exit status, 0 if both agents reached their goals, else 1; print the failures."""
    failures = [*too_low(learned), *too_far(sweep)]
    for line in failures:
        console.print(f"FAILED: {line}", style="red")
    if not failures:
        console.print(
            "GTrXL solved the task; the Decision Transformer reached its target returns.", style="green"
        )
    return int(bool(failures))


def too_low(learned: Report) -> Iterator[str]:
    """Yield a message if the success rate of GTrXL is too low."""
    rate = learned.success_rate or 0.0
    if rate < REQUIRED_SUCCESS:
        yield f"GTrXL's success rate {rate:.1%}, required at least {REQUIRED_SUCCESS:.0%}"


def too_far(sweep: TargetSweep) -> Iterator[str]:
    """Yield a message for each target return that was missed."""
    for target, report in sweep.reports.items():
        if abs(report.mean - target) > TOLERANCE:
            yield f"target {target:g}, but the Decision Transformer achieved {report.mean:.2f} on average"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Demo, prog="scripts/demo.sh")))
