"""Learning curves: a metric over the steps of one training, and statistics of several trainings."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlxf.evaluation.intervals import RESAMPLES, Band
from rlxf.experiments.columns import Points, listed, trailing_mean
from rlxf.experiments.log_files import Log, open_logs

MAX_GRID = 256
"""Number of grid points of a band, if the curves have more steps."""
_BATCH_POINTS = 32
"""Number of grid points that are resampled at a time, which take 2.5 MB."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Values of a metric over the steps of one training.

    Args:
        steps: float64 (n,), increasing.
        values: float64 (n,), finite.

    Raises:
        ValueError: if there is no point, the arrays differ in length, the steps do not increase, or a number
            is NaN or infinite.
    """

    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.steps.shape != self.values.shape or self.steps.ndim != 1 or not self.steps.size:
            raise ValueError(
                f"a curve needs one value for each step, and at least one, got shapes {self.steps.shape} and "
                f"{self.values.shape}"
            )
        if not (np.isfinite(self.steps).all() and np.isfinite(self.values).all()):
            raise ValueError("steps and values of a curve must be finite")
        if (np.diff(self.steps) <= 0).any():
            raise ValueError("steps of a curve must increase; use Curve.of_points to sort them")

    @classmethod
    def of_points(cls, steps: ArrayLike, values: ArrayLike) -> "Curve":
        """Return the curve of points in any order. Of several points at one step, the last one counts.

        Args:
            steps: numbers (n,).
            values: numbers (n,).

        Raises:
            ValueError: if there is no point, the arguments differ in length, or a number is NaN or infinite.
        """
        x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
        if x.shape != y.shape or x.ndim != 1 or not x.size:
            return cls(x, y)  # raises
        order = np.argsort(x, kind="stable")
        last = np.append(np.diff(x[order]) > 0, True)
        return cls(x[order][last], y[order][last])

    def smooth(self, window: int) -> "Curve":
        """Return the curve of the means over the last ``window`` values; 1 returns an equal curve."""
        return Curve(self.steps, trailing_mean(self.values, window))

    def hold_until(self, step: float) -> "Curve":
        """Return the curve with its last value repeated at a later step; the curve itself at another one."""
        if step <= self.steps[-1]:
            return self
        return Curve(np.append(self.steps, step), np.append(self.values, self.values[-1]))

    def last(self, count: int = 1) -> float:
        """Return the mean of the last ``count`` values; of all values if there are fewer."""
        return float(self.values[-count:].mean())

    def mean_over(self, first: float, last: float) -> float | None:
        """Return the area under the curve from one step to another, divided by the number of steps.

        Points are joined by straight lines (trapezoidal rule). This is the mean of the metric over the
        training, in the unit of the metric.

        Args:
            first: first step.
            last: last step.

        Returns:
            The mean; None if the interval has length 0 or the curve does not cover it.
        """
        if first >= last or first < self.steps[0] or last > self.steps[-1]:
            return None
        inside = self.steps[(self.steps > first) & (self.steps < last)]
        grid = np.concatenate([[first], inside, [last]])
        return float(np.trapezoid(np.interp(grid, self.steps, self.values), grid) / (last - first))


def metrics_of(path: str | Path) -> list[str]:
    """Return the names of the metrics that the logs of a training contain.

    Args:
        path: folder of a run, or one of the files of `open_logs`.

    Raises:
        ValueError, OSError: as in `find_curve`.
    """
    return list(_metrics(open_logs(Path(path))))


def find_curve(path: str | Path, metric: str) -> Curve | None:
    """Return the curve of a metric of one training; None if the metric or each of its values is missing.

    Args:
        path: folder of a run of rlxf or Stable-Baselines3, or a log file: ``progress.csv`` or another CSV
            file with a column of steps, ``*monitor.csv``, or ``evaluations.npz``.
        metric: name of the metric, e.g. "eval/mean_reward".

    Raises:
        ValueError: if there is no log, or a file is damaged or too large; the message names the file and,
            where there is one, the line.
        OSError: if a file cannot be read.

    Warns:
        UserWarning: if a value is NaN or infinite; it is left out.
    """
    steps, values = find_points(path, metric)
    return Curve.of_points(steps, values) if len(steps) else None


def find_points(path: str | Path, metric: str) -> Points:
    """Return the points of a metric of one training, in the order of its log; none if the metric is missing.

    Arguments, errors and warnings are those of `find_curve`.
    """
    log = _metrics(open_logs(Path(path))).get(metric)
    return (np.empty(0), np.empty(0)) if log is None else log.points(metric)


def _metrics(logs: Sequence[Log]) -> dict[str, Log]:
    """Return metric -> the first log that has it."""
    found: dict[str, Log] = {}
    for log in logs:
        found = {metric: log for metric in log.metrics()} | found
    return found


def describe_metrics(metric: str, existing: Sequence[str]) -> str:
    """Return the end of a message about a missing metric: similar names, and the existing ones."""
    if not existing:
        return ": nothing was logged yet"
    near = get_close_matches(metric, existing, n=3)
    question = f"; did you mean {listed(near)}? The metrics are " if near else "; the metrics are "
    return question + listed(sorted(existing, key=_by_interest))


def _by_interest(metric: str) -> tuple[bool, str]:
    """Sort key: evaluations and rollouts before losses, times and others."""
    return not metric.startswith(("eval/", "rollout/")), metric


def hold_last_values(
    curves: Sequence[Curve], ended_early: Sequence[bool], last: float | None = None
) -> list[Curve]:
    """Return the curves; those of trainings that ended early keep their last value up to a step.

    A training that ended early had reached its return. Without this, the mean of several trainings would end
    with the first one of them.

    Args:
        curves: curves of several trainings.
        ended_early: for each training, whether it ended early because an evaluation reached a return.
        last: the step; None for the last one of all curves.
    """
    last = max((curve.steps[-1] for curve in curves), default=0.0) if last is None else last
    return [
        curve.hold_until(last) if early else curve for curve, early in zip(curves, ended_early, strict=True)
    ]


def interpolate(curves: Sequence[Curve], grid: ArrayLike) -> NDArray[np.float64]:
    """Return the values of curves at common steps, (curves, n).

    Points are joined by straight lines. A curve is not extrapolated: it is NaN before its first step and
    beyond its last one, where nothing is known about this training. See `hold_last_values` for trainings that
    ended early.

    Args:
        curves: curves of several trainings.
        grid: steps (n,).
    """
    x = np.asarray(grid, np.float64)
    return np.stack([np.interp(x, each.steps, each.values, left=np.nan, right=np.nan) for each in curves])


def common_steps(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the first and the last step that all curves cover; without any, the first exceeds the last."""
    return max(curve.steps[0] for curve in curves), min(curve.steps[-1] for curve in curves)


def common_grid(curves: Sequence[Curve]) -> NDArray[np.float64]:
    """Return steps that all curves cover, (n,): their own steps, or 256 equidistant ones if there are more.

    It is empty if no step is covered by all curves.
    """
    first, last = common_steps(curves)
    if first > last:
        return np.empty(0)
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    steps = steps[(steps >= first) & (steps <= last)]
    return steps if len(steps) <= MAX_GRID else np.linspace(first, last, MAX_GRID)


def band(table: ArrayLike, seed: int = 0) -> Band:
    """Return mean and 95% bootstrap interval over seeds at each grid point.

    In each of 9,999 resamples, whole curves are drawn with replacement; the intervals are the percentiles
    of their means at each point, not a band for the whole curve. Points at which a curve is NaN have no
    mean, because a mean over the other seeds would jump. One curve has intervals of width 0.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife".

    Args:
        table: values (seeds, n), as `interpolate` returns them.
        seed: seed of the resamples.

    Raises:
        ValueError: if the table has no row or is not two-dimensional.
    """
    values = np.asarray(table, np.float64)
    if values.ndim != 2 or not len(values):
        raise ValueError(f"a band needs a table (seeds, n) with at least one row, got shape {values.shape}")
    seeds = len(values)
    drawn = np.random.default_rng(seed).integers(seeds, size=(RESAMPLES, seeds))
    counts = np.stack([(drawn == row).sum(axis=1) for row in range(seeds)], axis=1) / seeds
    mean = values.mean(axis=0)
    parts = [values[:, start : start + _BATCH_POINTS] for start in range(0, values.shape[1], _BATCH_POINTS)]
    bands = [Band.of_resamples(part.mean(axis=0), counts @ part) for part in parts]
    lows, highs = ([getattr(each, end) for each in bands] for end in ("low", "high"))
    return Band(mean, *(np.concatenate([np.empty(0), *ends]) for ends in (lows, highs)))
