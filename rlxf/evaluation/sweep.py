"""Evaluation at several target returns, comparison of reports, plot of achieved against target returns."""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # its submodules load lazily; scipy.stats takes a second
from numpy.typing import NDArray
from stable_baselines3.common.logger import Figure as LoggedFigure
from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from torch.utils.tensorboard import SummaryWriter

from rlxf.envs.wrappers.return_to_go import is_return_conditioned
from rlxf.evaluation.report import Report, explain_scores, write_scalars
from rlxf.utils.tables import Table, Tabular

if TYPE_CHECKING:
    from matplotlib import figure
    from matplotlib.figure import Figure


def compare(
    reports: Mapping[str, Report], title: str = "Comparison of agents", heading: str = "agent"
) -> Table:
    """Return a table with a row per report: episodes, returns, and success rate and score if available.

    Nothing is averaged over rows, so the table can compare the last and the best checkpoint of a run.

    Args:
        reports: reports by name, at least one.
        title: title of the table.
        heading: heading of the column of names.

    Returns:
        A table that ``print`` renders.
    """
    columns = {name: cell for name, cell in COLUMNS.items() if any(map(cell, reports.values()))}
    table = Table(heading, *columns, title=title)
    for name, report in reports.items():
        table.add_row(name, *(cell(report) for cell in columns.values()))
    references = [report.references for report in reports.values() if report.references is not None]
    if references:
        table.caption = explain_scores(references[0])
    return table


def _success(report: Report) -> str:
    return "" if report.success_rate is None else f"{report.success_rate:.1%}"


def _score(report: Report) -> str:
    return "" if report.normalized_score is None else f"{report.normalized_score:.1f}"


COLUMNS = {
    "episodes": lambda report: str(report.episodes),
    "mean return": lambda report: f"{report.mean:.4g}",
    "95% interval": lambda report: "{:.4g} to {:.4g}".format(*report.ci),
    "IQM": lambda report: f"{report.iqm:.4g}",
    "success": _success,
    "normalized score": _score,
}


OTHERS = ("stdout", "log", "json", "csv")
"""SB3's output formats that do not support figures and raise an error."""


def write_figure(
    draw: "Callable[[], figure.Figure]", tag: str, logger: Logger | SummaryWriter, step: int
) -> None:
    """Write a figure to TensorBoard's images at ``step``. An SB3 logger writes it at its next ``dump``.

    Without TensorBoard, ``draw`` is not called.
    """
    if isinstance(logger, SummaryWriter):
        logger.add_figure(tag, draw(), step, close=False)
    elif any(isinstance(output, TensorBoardOutputFormat) for output in logger.output_formats):
        logger.record(tag, LoggedFigure(draw(), close=False), exclude=OTHERS)


MIN_RANKED = 3
"""Smallest number of targets with a rank correlation; with two, it can only be -1 or 1."""


@dataclass(frozen=True, eq=False, repr=False)
class TargetSweep(Tabular):
    """Reports of a return-conditioned agent for several target returns.

    ``print(sweep)`` and notebooks show the table.

    Args:
        reports: report of each target return, at least one. The first target is used where a single number
            is needed.
        data_range: smallest and largest return of an episode in the training data; None if unknown.
    """

    reports: dict[float, Report]
    data_range: tuple[float, float] | None = None

    @property
    def targets(self) -> NDArray[np.float64]:
        """Target returns, float64 (n,)."""
        return np.array(list(self.reports), np.float64)

    @property
    def achieved(self) -> NDArray[np.float64]:
        """Mean return at each target, float64 (n,)."""
        return np.array([report.mean for report in self.reports.values()], np.float64)

    @property
    def first(self) -> Report:
        """Report of the first target."""
        return next(iter(self.reports.values()))

    @property
    def mean(self) -> float:
        """Mean return at the first target."""
        return self.first.mean

    @cached_property
    def spearman(self) -> float | None:
        """Spearman's rank correlation of targets and mean returns, from -1 to 1.

        It is None with fewer than three targets, where it has no meaning, or if all mean returns are equal.
        """
        if len(self.reports) < MIN_RANKED or np.ptp(self.achieved) == 0:
            return None
        return float(scipy.stats.spearmanr(self.targets, self.achieved).statistic)

    def scalars(self) -> dict[str, float]:
        """Return the value of each TensorBoard tag.

        The tags are those of `Report.scalars` for the first target; ``eval/target_{g}/return_mean``,
        ``return_iqm``, ``ci_low``, ``ci_high``, ``success_rate`` and ``normalized_score`` for each target g;
        and ``eval/spearman``.
        """
        values = self.first.scalars()
        for target, report in self.reports.items():
            values |= {f"eval/target_{target:g}/{name}": value for name, value in _of_target(report).items()}
        return values if self.spearman is None else values | {"eval/spearman": self.spearman}

    def log(self, logger: Logger | SummaryWriter, step: int) -> None:
        """Write `scalars` at ``step`` to an SB3 logger or a TensorBoard writer, and flush it.

        With several targets, `figure` is written to TensorBoard's images with tag ``eval/targets``.
        """
        if len(self.reports) > 1:
            write_figure(self.figure, "eval/targets", logger, step)
        write_scalars(self.scalars(), logger, step)

    def to_json(self) -> str:
        """Return the targets with the content of `Report.to_json` as JSON text."""
        reports = [
            {"target": target} | json.loads(report.to_json()) for target, report in self.reports.items()
        ]
        return json.dumps({"spearman": self.spearman, "data_range": self.data_range, "targets": reports})

    def __repr__(self) -> str:
        achieved = ", ".join(f"{target:g}: {report.mean:.4g}" for target, report in self.reports.items())
        return f"<{type(self).__name__}: mean return of each target {{{achieved}}}>"

    def table(self) -> Table:
        """Return a table with a row for each target, which ``print`` renders."""
        by_name = {f"{target:g}": report for target, report in self.reports.items()}
        title = ", ".join(filter(None, ("Requested and achieved", self._correlation)))
        return compare(by_name, title, "target")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write `figure` to a new file, replacing an existing one; the suffix determines the format.

        Raises:
            OSError: if the file cannot be written.
        """
        Path(path).unlink(missing_ok=True)  # savefig would follow a link
        self.figure().savefig(path)

    def figure(self) -> "Figure":
        """Plot mean returns over targets with 95% intervals, as a matplotlib figure of 720 by 600 pixels."""
        from matplotlib.figure import Figure  # the import takes half a second, and most sweeps need none

        figure = Figure(figsize=(6, 5), dpi=120, layout="constrained")
        axes = figure.subplots()
        low, high = np.array([report.ci for report in self.reports.values()]).T
        bars = np.stack([self.achieved - low, high - self.achieved])
        order = np.argsort(self.targets)
        axes.axline((self.targets[0], self.targets[0]), slope=1, color="grey", linestyle="--", label="target")
        axes.errorbar(
            self.targets[order],
            self.achieved[order],
            bars[:, order],
            fmt="o-",
            capsize=3,
            label="mean, 95% interval",
        )
        if self.data_range is not None:
            axes.axvspan(*self.data_range, color="tab:green", alpha=0.1, label="returns in the data")
        axes.set(xlabel="target return", ylabel="achieved return", title=self._correlation)
        axes.legend()
        return figure

    @property
    def _correlation(self) -> str:
        """Spearman's rank correlation in words; "" with fewer than three targets."""
        value = "undefined" if self.spearman is None else f"{self.spearman:.2f}"
        return "" if len(self.reports) < MIN_RANKED else f"Spearman's rank correlation {value}"


def _of_target(report: Report) -> dict[str, float]:
    low, high = report.ci
    values = {
        "return_mean": report.mean,
        "return_iqm": report.iqm,
        "ci_low": low,
        "ci_high": high,
        "success_rate": report.success_rate,
        "normalized_score": report.normalized_score,
    }
    return {name: value for name, value in values.items() if value is not None}


def validate_targets(targets: Sequence[float], data_range: tuple[float, float] | None) -> list[float]:
    """Return the targets as floats; warn about those outside the range of returns in the data.

    Raises:
        ValueError: if there is no target, or a target is not finite or a duplicate.
    """
    values = [float(target) for target in targets]
    if not values or not all(map(math.isfinite, values)) or len(set(values)) < len(values):
        raise ValueError(
            f"target_returns must be one or more finite numbers without duplicates, got {list(targets)}"
        )
    if data_range is not None:
        _warn_outside(values, *data_range)
    return values


def check_return_conditioned(agent: Any) -> None:
    """Raise if the agent is known not to be conditioned on a return.

    Agents trained offline, and agents with the observation space of `ReturnToGo`, are conditioned.

    Raises:
        ValueError: if the agent is not conditioned on a return.
    """
    space = getattr(agent, "observation_space", None)
    if data_range(agent) is None and space is not None and not is_return_conditioned(space):
        raise ValueError(
            f"target_returns needs an agent that is conditioned on a return, such as DecisionTransformer, "
            f"got {type(agent).__name__}: leave target_returns out"
        )


def data_range(agent: Any) -> tuple[float, float] | None:
    """Return the smallest and the largest return of an episode in the agent's data; None if unknown."""
    return getattr(agent, "return_range", None)


def _warn_outside(targets: list[float], low: float, high: float) -> None:
    outside = [target for target in targets if not low <= target <= high]
    if outside:
        warnings.warn(
            f"target returns {', '.join(f'{target:g}' for target in outside)} are outside the range of "
            f"returns in the data, {low:g} to {high:g}: the agent must extrapolate",
            stacklevel=4,
        )
