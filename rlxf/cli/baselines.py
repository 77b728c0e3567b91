"""Baselines of a Decision Transformer: the data, behavior cloning, and cloning of the best episodes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

from rlxf.agents.mlp import BehaviorCloning
from rlxf.agents.mlp.behavior_cloning import MIN_EPISODES
from rlxf.cli.output import print_out
from rlxf.cli.progress import OFFLINE_METRICS, progress
from rlxf.data import Trajectories
from rlxf.evaluation import Report, TargetSweep, compare, evaluate
from rlxf.training.strict_json import write_json_file

BASELINE_FRACTIONS = {"BC": 1.0, "BC, best 10%": 0.1}
"""Name of a baseline -> fraction of the episodes that it imitates."""
FILE = "baselines.json"
"""Name of the file with the numbers in the folder of a run."""


def evaluate_baselines(
    data: Trajectories,
    fresh_env: Callable[[Any, int], AbstractContextManager[VecEnv]],
    updates: int,
    episodes: int,
    verbose: bool,
    **settings: Any,
) -> dict[str, Report]:
    """Train the baselines, and return their reports by name, the returns of the data first.

    With fewer than ten episodes, the cloning of the best tenth is left out (`report_missing_baselines`).

    Args:
        data: training data.
        fresh_env: function of an agent and a number of episodes that opens environments for an evaluation.
        updates: number of updates of each baseline.
        episodes: number of episodes of each evaluation.
        verbose: show progress.
        **settings: further arguments of `BehaviorCloning`.
    """
    returns = np.asarray(data.returns, np.float64)
    reports = {"data": Report(returns, data.lengths, references=data.reference_scores)}
    for name, fraction in BASELINE_FRACTIONS.items():
        if _is_missing(fraction, data):
            continue
        agent = BehaviorCloning(data, fraction, **settings)
        agent.set_logger(Logger(None, []))
        with progress(verbose, "updates", updates, OFFLINE_METRICS) as callbacks:
            agent.learn(updates, callbacks)
        with fresh_env(agent, episodes) as env:
            reports[name] = evaluate(agent, env, episodes, progress_bar=verbose and name)
    return reports


def report_missing_baselines(data: Trajectories) -> None:
    """Print a line for each baseline that needs more episodes than the data have."""
    for name, fraction in BASELINE_FRACTIONS.items():
        if _is_missing(fraction, data):
            print_out(f"{name} is left out: it needs {MIN_EPISODES} episodes, the data have {data.episodes}")


def _is_missing(fraction: float, data: Trajectories) -> bool:
    return fraction < 1 and data.episodes < MIN_EPISODES


def report_baselines(
    folder: Path, baselines: Mapping[str, Report], reports: Mapping[str, Report | TargetSweep]
) -> None:
    """Print one table of the baselines and the checkpoints, and write its numbers to `FILE`.

    Args:
        folder: folder of the run.
        baselines: result of `evaluate_baselines`.
        reports: checkpoint name -> report.
    """
    rows = dict(baselines)
    for name, report in reports.items():
        if isinstance(report, TargetSweep):
            labels = report.labels
            rows |= {f"{name}, target {labels[target]}": each for target, each in report.reports.items()}
        else:
            rows[name] = report
    print_out(compare(rows, "Data, behavior cloning and this agent"))
    write_json_file(folder / FILE, {name: report.scalars() for name, report in rows.items()})
