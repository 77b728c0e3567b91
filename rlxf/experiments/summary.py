"""Summary of an experiment: tables of returns and scores, learning curves and performance profiles."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from rlxf.evaluation.aggregates import (
    interquartile_mean_over_runs,
    mean_score,
    median_over_runs,
    median_over_tasks,
    optimality_gap,
    probability_of_improvement,
)
from rlxf.evaluation.intervals import Interval, stratified_interquartile_mean
from rlxf.experiments.curves import find_curve
from rlxf.experiments.figures import (
    MAX_LINES,
    MAX_PANELS,
    learning_curves,
    performance_profile_figure,
    save_figure,
)
from rlxf.experiments.groups import Group
from rlxf.experiments.jobs import ExperimentError
from rlxf.experiments.plan import COMMANDS, RESULT_FILES, Agent, Plan, Task
from rlxf.experiments.results import Results
from rlxf.training.serialization import load_json_file
from rlxf.utils.files import atomic_write
from rlxf.utils.tables import Table, printable

METRIC = "eval/mean_reward"
"""Metric of the learning curves."""
TASK_COLUMNS = ("agent", "seeds", "IQM (95% interval)", "mean", "median", "worst seed", "minutes")
STEPS = "steps"
"""Additional column of a task whose trainings can end early."""
ALL_COLUMNS = ("agent", "seeds", "IQM", "mean", "median", "optimality gap")
TABLE, NUMBERS, CURVES, PROFILE = RESULT_FILES
FIGURES = CURVES, PROFILE
NOTE = (
    "IQM of a task: mean of the middle half of all episodes of all seeds. IQM of normalized scores: mean of "
    "the middle half of the runs. Intervals: stratified bootstrap over seeds and episodes. Minutes: median "
    "wall-clock time of a run."
)
STEPS_NOTE = (
    "Steps: median steps or updates of a run, which ends once an evaluation reaches stop_return. "
    "In the figure, such a run keeps its last value."
)


@dataclass(frozen=True)
class Summary:
    """Tables and statistics of an experiment. Each is computed once, as a bootstrap takes up to a second.

    Args:
        results: results of the runs.
    """

    results: Results

    @cached_property
    def tables(self) -> list[Table]:
        """A table for each task, and tables of normalized scores over all tasks that have them.

        Agents of environments and agents of datasets have a table each. An agent that lacks one of its tasks
        is left out.
        """
        tables = [_task_table(self.results, task) for task in self.results.plan.tasks]
        kinds = {tuple(self.tasks(agent)): None for agent in self.results.plan.agents}
        return [*tables, *(_score_table(self, tasks) for tasks in kinds if tasks)]

    def tasks(self, agent: Agent) -> list[str]:
        """Return the names of the tasks with normalized scores on which an agent trains."""
        tasks = self.results.plan.tasks
        return [task.name for task in tasks if task.score_range is not None and agent.trains_on(task)]

    @cached_property
    def scores(self) -> dict[str, list[NDArray[np.float64]]]:
        """Agent -> its scores (S, E) on each of its `tasks`, for the agents with results on all of them."""
        tasks = {task.name: task for task in self.results.plan.tasks}
        scores = {
            agent.name: [self.results.scores(tasks[name], agent.name) for name in self.tasks(agent)]
            for agent in self.results.plan.agents
        }
        return {
            agent: [table for table in tables if table is not None]
            for agent, tables in scores.items()
            if tables and all(table is not None for table in tables)
        }

    @cached_property
    def statistics(self) -> dict[str, dict[str, Interval]]:
        """Agent -> statistics of its scores by name."""
        return {agent: _statistics(tables) for agent, tables in self.scores.items()}


def _task_table(results: Results, task: Task) -> Table:
    added = [STEPS] if _can_end_early(results, task) else []
    table = Table(*TASK_COLUMNS, *added, title=f"{task.name}: returns, {results.plan.checkpoint} checkpoint")
    for agent in _agents(results.plan, task):
        steps = [_steps(results, task, agent)] if added else []
        table.add_row(results.label(agent, [task.name]), *_task_cells(results, task, agent), *steps)
    return table


def _can_end_early(results: Results, task: Task) -> bool:
    """Return whether a run on a task has a return at which its training ends."""
    cells = [run.cell for run in results.runs if run.cell.task == task.name]
    return any(cell.settings.get("stop_return") is not None for cell in cells)


def _steps(results: Results, task: Task, agent: str) -> str:
    """Return the median number of steps or updates of the complete runs as text; "" if there are none."""
    runs = results.of(task.name, agent)
    steps = [run.completion.steps for run in runs if run.completion is not None]
    return f"{np.median(steps):,.0f}" if steps else ""


def _agents(plan: Plan, task: Task) -> list[str]:
    return [agent.name for agent in plan.agents if agent.trains_on(task)]


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
        f"{median_over_runs([returns]).value:.4g}",
        f"{returns.mean(axis=1).min():.4g}",
        f"{np.median(seconds) / 60:.1f}" if seconds else "",
    ]


def _score_table(summary: Summary, names: Sequence[str]) -> Table:
    """Return the table of the agents that train on the named tasks, which have normalized scores."""
    members = [agent.name for agent in summary.results.plan.agents if summary.tasks(agent) == [*names]]
    scored = [agent for agent in members if agent in summary.scores]
    over = f"over {len(names)} tasks" if len(names) > 1 else f"on {names[0]}"
    title = f"Normalized scores {over} (95% intervals)"
    table = Table(*ALL_COLUMNS, *(f"P(this > {first})" for first in scored[:1]), title=title)
    for agent in scored:
        tables, reference = summary.scores[agent], summary.scores[scored[0]]
        table.add_row(
            summary.results.label(agent, names),
            str(min(map(len, tables))),
            *(f"{value:.2f}" for value in summary.statistics[agent].values()),
            "" if tables is reference else f"{probability_of_improvement(tables, reference):.2f}",
        )
    return table


def _statistics(tables: Sequence[NDArray[np.float64]]) -> dict[str, Interval]:
    """Return the statistics of the scores (S, E) of an agent on several tasks by name."""
    return {
        "iqm": interquartile_mean_over_runs(tables),
        "mean": mean_score(tables),
        "median": median_over_tasks(tables),
        "optimality_gap": optimality_gap(tables),
    }


def write_summary(summary: Summary, folder: Path) -> Iterator[Path]:
    """Write the tables, the numbers and the figures into the folder of an experiment, and yield their paths.

    Each file is replaced atomically. Figures of an earlier summary that this one lacks are removed.

    Raises:
        OSError: if a file cannot be written.
        ExperimentError: if the log of a run is damaged.
    """
    tables = [table.markdown() for table in summary.tables]
    figures = dict(_figures(summary, folder))
    results = summary.results
    left_out = _left_out(results.plan, figures)
    early = any(_can_end_early(results, task) for task in results.plan.tasks)
    note = f"{NOTE} {STEPS_NOTE}" if early else NOTE
    text = "\n\n".join([*tables, note, *left_out, *_failures(results)])
    numbers = json.dumps(_as_json(summary), indent=1, allow_nan=False)  # of any size, unlike `dump_json`
    yield _written(folder / TABLE, f"{text}\n".encode())
    yield _written(folder / NUMBERS, f"{numbers}\n".encode())
    for name in FIGURES:
        if name in figures:
            save_figure(figures[name], folder / name)
            yield folder / name
        else:
            (folder / name).unlink(missing_ok=True)


def _written(path: Path, content: bytes) -> Path:
    atomic_write(path, lambda file: file.write(content))
    return path


def _drawn(plan: Plan) -> list[str]:
    """Return the names of the agents in the figures."""
    return [agent.name for agent in plan.agents][:MAX_LINES]


def _left_out(plan: Plan, figures: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each of the written figures that leaves out agents or tasks."""
    agents, tasks = len(plan.agents), len(plan.tasks)
    shown = f"{min(agents, MAX_LINES)} of {agents} agents"
    if CURVES in figures and (agents > MAX_LINES or tasks > MAX_PANELS):
        yield f"{CURVES} shows the first {shown} and {min(tasks, MAX_PANELS)} of {tasks} tasks."
    if PROFILE in figures and agents > MAX_LINES:
        yield f"{PROFILE} shows the first {shown}."
    if PROFILE in figures and len({COMMANDS[agent.command] for agent in plan.agents}) > 1:
        yield f"{PROFILE} shows each agent on its own tasks, those with environments or those with datasets."


def _failures(results: Results) -> list[str]:
    lines = [f"- {run.cell.name}: {run.failure}" for run in results.failures]
    return ["Failed runs:\n\n" + "\n".join(lines)] if lines else []


def _as_json(summary: Summary) -> dict[str, Any]:
    """Return the returns of all runs and the statistics of scores as a JSON object."""
    return {
        "checkpoint": summary.results.plan.checkpoint,
        "runs": [
            {
                "task": run.cell.task,
                "agent": run.cell.agent,
                "seed": run.cell.seed,
                "returns": None if run.returns is None else run.returns.tolist(),
                "checkpoint": None if run.returns is None else run.checkpoint,
                "seconds": None if run.outcome is None else run.outcome.seconds,
                "steps": None if run.completion is None else run.completion.steps,
                "failure": run.failure or None,
            }
            for run in summary.results.runs
        ],
        "scores": {
            agent: {name: [value.value, value.low, value.high] for name, value in values.items()}
            for agent, values in summary.statistics.items()
        },
    }


def other_results(folder: Path, named: Collection[tuple[str, str]]) -> list[str]:
    """Return "TASK/AGENT" of the results in the folder of an experiment that are not among ``named``.

    A damaged file counts as one without results, since it will be replaced.

    Args:
        folder: folder of the experiment.
        named: tasks and agents of the experiment file.
    """
    try:
        runs = load_json_file(folder / NUMBERS)["runs"]
        found = {(run["task"], run["agent"]) for run in runs}
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return sorted(printable(f"{task}/{agent}") for task, agent in found - {*named})


def _figures(summary: Summary, folder: Path) -> Iterator[tuple[str, Figure]]:
    """Yield name and figure of the learning curves, and of the performance profiles, if there are any."""
    results = summary.results
    drawn = _drawn(summary.results.plan)
    groups = [
        group
        for task in results.plan.tasks[:MAX_PANELS]
        for agent in _agents(results.plan, task)
        if agent in drawn and (group := _group(results, folder, task.name, agent)).curves
    ]
    if groups:
        yield CURVES, learning_curves(groups, METRIC)
    if scores := {agent: summary.scores[agent] for agent in drawn if agent in summary.scores}:
        yield PROFILE, performance_profile_figure(scores)


def _group(results: Results, folder: Path, task: str, agent: str) -> Group:
    """Return the learning curves of an agent on a task; those of incomplete runs end earlier."""
    runs = results.of(task, agent)
    logged = [run for run in runs if (folder / run.cell.name / "progress.csv").is_file()]
    try:
        found = [(run.ended_early, find_curve(folder / run.cell.name, METRIC)) for run in logged]
    except ValueError as error:
        raise ExperimentError(f"{error}; remove the folder of the run to repeat it") from None
    curves = [(early, curve) for early, curve in found if curve is not None]
    unfinished = sum(run.returns is None for run in runs)
    unit = "updates" if "dataset" in runs[0].cell.settings else "environment steps"
    early = [early for early, _ in curves]
    return Group(agent, task, [curve for _, curve in curves], unfinished, unit, early)
