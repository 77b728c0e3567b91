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

from rlxf.evaluation.aggregates import intervals_of, probability_of_improvement
from rlxf.evaluation.intervals import Interval
from rlxf.experiments.curves import Curve, find_points
from rlxf.experiments.figures import (
    MAX_LINES,
    MAX_PANELS,
    learning_curves,
    performance_profile_figure,
    save_figure,
)
from rlxf.experiments.groups import Group
from rlxf.experiments.plan import COMMANDS, RESULT_FILES, Agent, Cell, Plan
from rlxf.experiments.results import Results
from rlxf.experiments.runs import unit_of
from rlxf.experiments.task_table import ONE_SEED, can_end_early, has_one_seed, task_table
from rlxf.training.strict_json import load_json_file
from rlxf.utils.files import write_file
from rlxf.utils.run_files import MEAN_RETURN, PROGRESS
from rlxf.utils.tables import Table, printable
from rlxf.utils.warnings import warn_user

SCORE_STATISTICS = {
    "iqm": "interquartile_mean_over_runs",
    "mean": "mean_score",
    "median": "median_over_tasks",
    "optimality_gap": "optimality_gap",
}
"""Statistics of normalized scores: name in the file of numbers -> name for `intervals_of`."""
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

        Agents of environments and agents of datasets have a table each. The caption names the agents that are
        left out, because they have no complete run on one of their tasks. Without other agents, there is no
        table.
        """
        tables = [task_table(self.results, task) for task in self.results.plan.tasks]
        scores = [_score_table(self, tasks) for tasks in self.kinds]
        return [*tables, *(table for table in scores if table.row_count)]

    @property
    def kinds(self) -> dict[tuple[str, ...], list[str]]:
        """Names of tasks with normalized scores -> names of the agents that train on exactly these."""
        kinds: dict[tuple[str, ...], list[str]] = {}
        for agent in self.results.plan.agents:
            kinds.setdefault(tuple(self.tasks(agent)), []).append(agent.name)
        return {tasks: agents for tasks, agents in kinds.items() if tasks}

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


def _score_table(summary: Summary, names: Sequence[str]) -> Table:
    """Return the table of the agents that train on the named tasks, which have normalized scores."""
    members = summary.kinds[tuple(names)]
    scored = [agent for agent in members if agent in summary.scores]
    over = f"over {len(names)} tasks" if len(names) > 1 else f"on {names[0]}"
    title = f"Normalized scores {over} (95% intervals)"
    table = Table(*ALL_COLUMNS, *(f"P(this > {first})" for first in scored[:1]), title=title)
    notes = [*_without_scores(summary, names), *_changed_reference(members, scored)]
    if any(has_one_seed(summary.scores[agent]) for agent in scored):
        notes.append(ONE_SEED)
    table.caption = " ".join(notes) or None
    for agent in scored:
        tables, reference = summary.scores[agent], summary.scores[scored[0]]
        table.add_row(
            summary.results.label(agent, names),
            _seeds(tables),
            *(f"{value:.2f}" for value in summary.statistics[agent].values()),
            "" if tables is reference else f"{probability_of_improvement(tables, reference):.2f}",
        )
    return table


def _seeds(tables: Sequence[NDArray[np.float64]]) -> str:
    """Return the number of complete runs on each task, e.g. "5", or "1 to 5" if tasks differ."""
    fewest, most = min(map(len, tables)), max(map(len, tables))
    return str(most) if fewest == most else f"{fewest} to {most}"


def _without_scores(summary: Summary, names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each agent that trains on the named tasks, and has no complete run on one."""
    for agent in summary.kinds[tuple(names)]:
        missing = [name for name in names if summary.results.returns(name, agent) is None]
        if missing:
            reason = f"no complete run on {', '.join(missing)}"
            profile = f" and of {PROFILE}" if _profiled(summary) else ""
            yield f"{agent} is left out of the normalized scores{profile}: {reason}."


def _changed_reference(members: Sequence[str], scored: Sequence[str]) -> list[str]:
    """Return a sentence if the agent with which others are compared is not the first one of the file."""
    if scored[:1] in ([], members[:1]):
        return []
    return [f"The probabilities compare with {scored[0]} in place of {members[0]}."]


def _statistics(tables: Sequence[NDArray[np.float64]]) -> dict[str, Interval]:
    """Return the statistics of the scores (S, E) of an agent on several tasks by name."""
    intervals = intervals_of(tables, list(SCORE_STATISTICS.values()))
    return {name: intervals[function] for name, function in SCORE_STATISTICS.items()}


def write_summary(summary: Summary, folder: Path) -> Iterator[Path]:
    """Write the tables, the numbers and the figures into the folder of an experiment, and yield their paths.

    Each file is replaced atomically. Figures of an earlier summary that this one lacks are removed.

    Raises:
        OSError: if a file cannot be written.

    Warns:
        UserWarning: if the log of a run cannot be read; the figure lacks its curve.
    """
    tables = [table.markdown() for table in summary.tables]
    figures = dict(_figures(summary, folder))
    results = summary.results
    left_out = [*_without_table(summary), *_left_out(results.plan, figures)]
    early = any(can_end_early(results, task) for task in results.plan.tasks)
    note = f"{NOTE} {STEPS_NOTE}" if early else NOTE
    text = "\n\n".join([*tables, note, *left_out, *_failures(results)])
    numbers = json.dumps(_as_json(summary), indent=1, allow_nan=False)  # of any size, unlike `dump_json`
    for name, content in ((TABLE, text), (NUMBERS, numbers)):
        write_file(folder / name, f"{content}\n".encode())
        yield folder / name
    for name in FIGURES:
        if name in figures:
            save_figure(figures[name], folder / name)
            yield folder / name
        else:
            (folder / name).unlink(missing_ok=True)


def _drawn(plan: Plan) -> list[str]:
    """Return the names of the agents in the figures."""
    return [agent.name for agent in plan.agents][:MAX_LINES]


def _profiled(summary: Summary) -> dict[str, list[NDArray[np.float64]]]:
    """Return agent -> its scores on each task, for the agents in `PROFILE`; without any, there is no file."""
    return {agent: summary.scores[agent] for agent in _drawn(summary.results.plan) if agent in summary.scores}


def _without_table(summary: Summary) -> Iterator[str]:
    """Yield the sentences of `_without_scores` that no caption has, as there is no table of scores."""
    for names, agents in summary.kinds.items():
        if not summary.scores.keys() & {*agents}:
            yield " ".join(_without_scores(summary, names))


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


def other_results(folder: Path, cells: Collection[Cell]) -> list[str]:
    """Return the names of the results in the folder of an experiment that do not belong to ``cells``.

    They are "TASK/AGENT", and "TASK/AGENT/seed-N" if only this seed is not among the cells. A damaged file
    counts as one without results, since it will be replaced.

    Args:
        folder: folder of the experiment.
        cells: runs of the experiment file.
    """
    try:
        runs = load_json_file(folder / NUMBERS)["runs"]
        found = {(run["task"], run["agent"], run["seed"]) for run in runs if run["returns"] is not None}
    except (OSError, ValueError, TypeError, KeyError):
        return []
    others = found - {(cell.task, cell.agent, cell.seed) for cell in cells}
    pairs = {(cell.task, cell.agent) for cell in cells}
    ends = {other: f"/seed-{other[2]}" if other[:2] in pairs else "" for other in others}
    return sorted({printable(f"{task}/{agent}{ends[task, agent, seed]}") for task, agent, seed in others})


def _figures(summary: Summary, folder: Path) -> Iterator[tuple[str, Figure]]:
    """Yield name and figure of the learning curves, and of the performance profiles, if there are any."""
    results = summary.results
    drawn = _drawn(summary.results.plan)
    groups = [
        group
        for task in results.plan.tasks[:MAX_PANELS]
        for agent in results.plan.agents_on(task)
        if agent in drawn and (group := _group(results, folder, task.name, agent)).curves
    ]
    if groups:
        figure = learning_curves(groups, MEAN_RETURN)
        for axes in figure.axes:
            axes.set_ylabel("mean return")
        yield CURVES, figure
    if scores := _profiled(summary):
        yield PROFILE, performance_profile_figure(scores)


def _group(results: Results, folder: Path, task: str, agent: str) -> Group:
    """Return the learning curves of the complete runs of an agent on a task; of all if none is complete."""
    runs = results.of(task, agent)
    curves = [(run, _training_curve(folder / run.cell.name, run.returns is not None)) for run in runs]
    drawn = [(run, curve) for run, curve in curves if curve is not None]
    unfinished = sum(run.returns is None for run in runs)
    unit = unit_of(runs[0].cell.settings)
    early = [run.ended_early for run, _ in drawn]
    finished = [run.returns is not None for run, _ in drawn]
    group = Group(agent, task, [curve for _, curve in drawn], unfinished, unit, early, finished)
    return group.finished_only()


def _training_curve(run: Path, complete: bool) -> Curve | None:
    """Return the evaluations during a training; None if there are none, or the log cannot be read.

    The last one of a complete run follows the training and has other episodes, so it is left out unless it
    is the only one.
    """
    if not (run / PROGRESS).is_file():
        return None
    try:
        steps, values = find_points(run, MEAN_RETURN)
    except (OSError, ValueError) as error:
        warn_user(f"{error}; {CURVES} lacks this run: remove its folder to repeat it")
        return None
    during = len(steps) - 1 if complete and len(steps) > 1 else len(steps)
    return Curve.of_points(steps[:during], values[:during]) if during else None
