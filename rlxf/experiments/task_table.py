"""Table of the returns of the agents of an experiment on one task."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rlxf.evaluation.intervals import stratified_interquartile_mean
from rlxf.experiments.plan import Task
from rlxf.experiments.results import Results
from rlxf.utils.tables import Table

TASK_COLUMNS = ("agent", "seeds", "IQM (95% interval)", "mean", "median", "worst seed", "minutes")
STEPS = "steps"
"""Additional column of a task whose trainings can end early."""
ONE_SEED = "Where an agent has one seed, its interval is over episodes only."
"""Caption of a table with an interval that does not contain the variation between seeds."""


def task_table(results: Results, task: Task) -> Table:
    """Return the table of the returns of all agents that train on a task."""
    added = [STEPS] if can_end_early(results, task) else []
    table = Table(*TASK_COLUMNS, *added, title=f"{task.name}: returns, {results.plan.checkpoint} checkpoint")
    for agent in results.plan.agents_on(task):
        steps = [_steps(results, task, agent)] if added else []
        table.add_row(results.label(agent, [task.name]), *_task_cells(results, task, agent), *steps)
    if has_one_seed(results.returns(task.name, agent) for agent in results.plan.agents_on(task)):
        table.caption = ONE_SEED
    return table


def has_one_seed(tables: Iterable[NDArray[np.float64] | None]) -> bool:
    """Return whether one of the tables (S, E) has a single seed."""
    return any(table is not None and len(table) == 1 for table in tables)


def can_end_early(results: Results, task: Task) -> bool:
    """Return whether a run on a task has a return at which its training ends."""
    cells = [run.cell for run in results.runs if run.cell.task == task.name]
    return any(cell.settings.get("stop_return") is not None for cell in cells)


def _steps(results: Results, task: Task, agent: str) -> str:
    """Return the median number of steps or updates of the complete runs as text; "" if there are none."""
    runs = results.of(task.name, agent)
    steps = [run.completion.steps for run in runs if run.completion is not None]
    return f"{np.median(steps):,.0f}" if steps else ""


def _task_cells(results: Results, task: Task, agent: str) -> list[str]:
    runs = results.of(task.name, agent)
    returns = results.returns(task.name, agent)
    failed = sum(bool(run.failure) for run in runs)
    count = 0 if returns is None else len(returns)
    seeds = f"{count} of {len(runs)}" + (f", {failed} failed" if failed else "")
    if returns is None:
        return [seeds, "", "", "", "", ""]
    seconds = [run.outcome.seconds for run in runs if run.outcome and run.returns is not None]
    return [
        seeds,
        f"{stratified_interquartile_mean([returns]):.4g}",
        f"{returns.mean():.4g}",
        f"{np.median(returns.mean(axis=1)):.4g}",
        f"{returns.mean(axis=1).min():.4g}",
        f"{np.median(seconds) / 60:.1f}" if seconds else "",
    ]
