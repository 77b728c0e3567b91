"""Comparison of methods on one task: final scores, areas under the curves, probabilities of improvement."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Column

from rlxf.evaluation.aggregates import intervals_of, probability_of_improvement
from rlxf.evaluation.intervals import Interval
from rlxf.experiments.curves import common_steps
from rlxf.experiments.groups import Group
from rlxf.utils.files import write_file
from rlxf.utils.tables import Table

STATISTICS = ("mean", "iqm", "median")
HEADINGS = ("seeds", "steps", "mean (95% interval)", "IQM (95% interval)", "median (95% interval)", "AUC")
NO_INTERVAL = "Groups with one seed have no intervals; neither do probabilities computed from them."


@dataclass(frozen=True)
class GroupScores:
    """Statistics of a group over its seeds.

    The score of a seed is its last value of the metric, or the mean of its last values.

    Args:
        label: name of the method.
        task: name of the task; "" if unknown.
        scores: score of each seed.
        unfinished: number of trainings that did not end.
        steps: smallest and largest number of steps of a training.
        mean: mean of the scores with its interval.
        iqm: interquartile mean of the scores, which is the mean if there are less than four.
        median: median of the scores.
        area: mean over seeds of `Curve.mean_over` the steps that all trainings of the task cover, except for
            those of groups whose curves have one value, such as random agents; where those
            that ended early keep their last value (`Group.lines`); None if there are none.
        improvement: probability that a seed of the first group of the task scores higher than one of this
            group; None for the first group.
        compared_seeds: the smaller one of the numbers of seeds that this probability compares.
    """

    label: str
    task: str
    scores: tuple[float, ...]
    unfinished: int
    steps: tuple[float, float]
    mean: Interval
    iqm: Interval
    median: Interval
    area: float | None
    improvement: Interval | None
    compared_seeds: int

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len(self.scores)

    def record(self) -> dict[str, Any]:
        """Return the statistics as JSON values; ends of intervals are None for a single seed."""
        record: dict[str, Any] = {"task": self.task, "group": self.label, "seeds": self.seeds}
        record |= {"unfinished": self.unfinished, "first_steps": self.steps[0], "last_steps": self.steps[1]}
        for name in STATISTICS:
            record |= _interval_record(name, getattr(self, name), self.seeds > 1)
        record |= {"area_under_curve": self.area}
        return record | _interval_record(
            "probability_of_improvement", self.improvement, self.compared_seeds > 1
        )


def _interval_record(name: str, interval: Interval | None, defined: bool) -> dict[str, float | None]:
    """Return value and ends of an interval by name; the ends are None unless ``defined``."""
    if interval is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    low, high = (interval.low, interval.high) if defined else (None, None)
    return {name: interval.value, f"{name}_low": low, f"{name}_high": high}


def compare_groups(groups: Sequence[Group], metric: str, last: int = 1) -> list[GroupScores]:
    """Return the statistics of groups on one task.

    Args:
        groups: groups of one task; the probabilities of improvement are those of the first one.
        metric: name of the metric.
        last: number of values at the end of a curve whose mean is the score.

    Raises:
        ValueError: if there is no group, or the tasks differ; nothing is averaged over tasks.
    """
    tasks = list(dict.fromkeys(group.task for group in groups))
    if len(tasks) != 1:
        raise ValueError(f"groups to compare must have the same task, got {', '.join(tasks) or 'no group'}")
    first = final_scores(groups[0], last)
    end = max(curve.steps[-1] for group in groups for curve in group.curves)
    lines = [group.lines(metric, end) for group in groups]
    trained = [each for each in lines if any(len(curve.steps) > 1 for curve in each)]
    covered = common_steps([curve for each in trained or lines for curve in each])
    areas = [[curve.mean_over(*covered) for curve in each] for each in lines]
    return [
        _statistics(group, last, area, None if group is groups[0] else first)
        for group, area in zip(groups, areas, strict=True)
    ]


def final_scores(group: Group, last: int = 1) -> NDArray[np.float64]:
    """Return the mean of the ``last`` values of each curve, (seeds,)."""
    return np.array([curve.last(last) for curve in group.curves])


def _statistics(
    group: Group, last: int, areas: Sequence[float | None], first: NDArray[np.float64] | None
) -> GroupScores:
    scores = final_scores(group, last)
    covered = [area for area in areas if area is not None]
    ends = [float(curve.steps[-1]) for curve in group.curves]
    names = "mean_score", "interquartile_mean_over_runs", "median_over_runs"
    mean, iqm, median = intervals_of([scores], names).values()
    return GroupScores(
        label=group.label,
        task=group.task,
        scores=tuple(scores.tolist()),
        unfinished=group.unfinished,
        steps=(min(ends), max(ends)),
        mean=mean,
        iqm=iqm,
        median=median,
        area=float(np.mean(covered)) if covered else None,
        improvement=None if first is None else probability_of_improvement([first], [scores]),
        compared_seeds=len(scores) if first is None else min(len(first), len(scores)),
    )


def by_task(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return task -> its groups, both in the given order."""
    tasks: dict[str, list[Group]] = {}
    for group in groups:
        tasks.setdefault(group.task, []).append(group)
    return tasks


def comparison_table(rows: Sequence[GroupScores], metric: str, last: int = 1) -> Table:
    """Return a printable table of the statistics of one task.

    Args:
        rows: the statistics, at least one.
        metric: name of the metric.
        last: number of values at the end of a curve whose mean is the score.
    """
    headings = [*HEADINGS, *([f"P({rows[0].label} > this)"] * (len(rows) > 1))]
    score = f"last {metric}" if last == 1 else f"mean of the last {last} values of {metric}"
    table = Table(
        Column("group", overflow="fold"), *headings, title=f"{rows[0].task or 'unknown task'}: {score}"
    )
    for row in rows:
        table.add_row(*_cells(row)[: 1 + len(headings)])
    if any(row.seeds == 1 for row in rows):
        table.caption = NO_INTERVAL
    return table


def _cells(row: GroupScores) -> list[str]:
    low, high = row.steps
    return [
        row.label,
        f"{row.seeds}{_unfinished(row.unfinished)}",
        f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}",
        *(format_interval(getattr(row, name), row.seeds) for name in STATISTICS),
        "" if row.area is None else f"{row.area:.4g}",
        "" if row.improvement is None else format_interval(row.improvement, row.compared_seeds, ".2f"),
    ]


def describe_seeds(group: Group) -> str:
    """Return the number of seeds as text, followed by `describe_unfinished`."""
    seeds = len(group.curves)
    return ", ".join([f"{seeds} seed{'s' * (seeds > 1)}", *describe_unfinished([group])])


def describe_unfinished(groups: Sequence[Group]) -> list[str]:
    """Return the numbers of unfinished trainings as texts: of those among the seeds, and of the others."""
    left_out = sum(group.left_out for group in groups)
    among = sum(group.unfinished for group in groups) - left_out
    missing = f"{left_out} unfinished run{'s' * (left_out > 1)} left out"
    return [f"{among} unfinished"] * (among > 0) + [missing] * (left_out > 0)


def _unfinished(count: int) -> str:
    return f", {count} unfinished" if count else ""


def format_interval(interval: Interval, seeds: int, spec: str = ".4g") -> str:
    """Return an estimate with its interval; without it for a single seed."""
    return format(interval, spec) if seeds > 1 else format(interval.value, spec)


def write_comparison(path: Path, tasks: Sequence[Sequence[GroupScores]], metric: str, last: int = 1) -> None:
    """Write the statistics of all tasks atomically to a file, whose suffix determines the format.

    Args:
        path: file name that ends in .csv (a line for each group), .json (a list, with the score of each
            seed), or .md (the tables of `comparison_table`). An existing file is replaced.
        tasks: statistics of each task.
        metric: name of the metric.
        last: number of values at the end of a curve whose mean is the score.

    Raises:
        OSError: if the file cannot be written; an existing file is then unchanged.
    """
    rows = [row for each in tasks for row in each]
    suffix = path.suffix.lower()
    if suffix == ".md":
        text = "\n".join(f"{comparison_table(each, metric, last).markdown()}\n" for each in tasks)
    else:
        text = _to_json(rows, metric) if suffix == ".json" else _to_csv(rows, metric)
    write_file(path, text.encode())


def _to_csv(rows: Sequence[GroupScores], metric: str) -> str:
    """Return the records as CSV text with a header; None is an empty field."""
    records = [{"metric": metric} | row.record() for row in rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _to_json(rows: Sequence[GroupScores], metric: str) -> str:
    records = [{"metric": metric} | row.record() | {"scores": row.scores} for row in rows]
    return json.dumps(records, indent=2, allow_nan=False) + "\n"
