"""Reports of evaluations: returns of one or several target returns, intervals, tables, scalars and plots."""

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.logger import Figure as LoggedFigure
from stable_baselines3.common.logger import Logger
from torch.utils.tensorboard import SummaryWriter

from rlxf.data.reference_scores import ReferenceScores
from rlxf.evaluation.intervals import MIN_PAIRS, bootstrap_interval, interquartile_mean, rank_correlation
from rlxf.utils.tables import Table, Tabular
from rlxf.utils.tensorboard import record_for_tensorboard, writes_tensorboard

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATISTICS = ("episodes", "mean", "std", "iqm", "ci", "mean_length", "success_rate", "normalized_score")
"""Statistics of a `Report` in its JSON text."""
TARGET_NAMES = {"eval/mean_reward": "return_mean", "eval/iqm": "return_iqm"}
"""Tag of `Report.scalars` -> name in the tags of a `TargetSweep`, if it differs."""


@dataclass(frozen=True, eq=False, repr=False)
class Report(Tabular):
    """Returns of n episodes and their statistics.

    ``print(report)`` shows one line, ``print(report.table())`` and notebooks the table.

    Args:
        returns: float64 (n,), undiscounted sum of the raw rewards of each episode.
        lengths: int64 (n,), number of steps of each episode.
        successes: bool (n,), ``info["is_success"]`` at the end of each episode; None if the
            environment does not report it.
        references: returns with normalized scores 0 and 100; None if unknown.

    Raises:
        ValueError: if there is no episode, the arrays differ in length, or a return is NaN or infinite.
    """

    returns: np.ndarray
    lengths: np.ndarray
    successes: np.ndarray | None = None
    references: ReferenceScores | None = None

    def __post_init__(self) -> None:
        arrays = (self.returns, self.lengths, self.successes)
        shapes = [array.shape for array in arrays if array is not None]
        if len(set(shapes)) != 1 or len(shapes[0]) != 1 or not self.episodes:
            raise ValueError(
                f"a report needs one value per episode and at least one episode, got shapes {shapes}"
            )
        if not np.isfinite(self.returns).all():
            raise ValueError(f"returns must be finite, got {self.returns[~np.isfinite(self.returns)][0]}")

    @property
    def episodes(self) -> int:
        """Number of episodes n."""
        return len(self.returns)

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Standard deviation of the returns, divided by n as in SB3's ``evaluate_policy``.

        It is exactly 0 if all returns are equal: they are shifted by the first, since means are rounded.
        """
        return float(np.std(self.returns - self.returns[0]))

    @property
    def iqm(self) -> float:
        """Interquartile mean of the returns, see `interquartile_mean`."""
        return interquartile_mean(self.returns)

    @cached_property
    def ci(self) -> tuple[float, float]:
        """95% confidence interval of the mean return, see `bootstrap_interval`; deterministic."""
        return bootstrap_interval(self.returns)

    @property
    def mean_length(self) -> float:
        """Mean number of steps of an episode."""
        return float(np.mean(self.lengths))

    @property
    def success_rate(self) -> float | None:
        """Fraction of successful episodes; None if the environment does not report success."""
        return None if self.successes is None else float(np.mean(self.successes))

    @property
    def normalized_score(self) -> float | None:
        """Mean return normalized with the reference scores (`ReferenceScores.normalize`), or None."""
        return None if self.references is None else float(self.references.normalize(self.mean))

    def scalars(self) -> dict[str, float]:
        """Return the value of each TensorBoard tag; success rate and normalized score only if not None."""
        low, high = self.ci
        values = {
            "eval/mean_reward": self.mean,
            "eval/mean_ep_length": self.mean_length,
            "eval/success_rate": self.success_rate,
            "eval/iqm": self.iqm,
            "eval/ci_low": low,
            "eval/ci_high": high,
            "eval/normalized_score": self.normalized_score,
        }
        return {tag: value for tag, value in values.items() if value is not None}

    def log(self, logger: Logger | SummaryWriter, step: int) -> None:
        """Write `scalars` at ``step`` to an SB3 logger or a TensorBoard writer, and flush it."""
        write_scalars(self.scalars(), logger, step)

    def to_json(self) -> str:
        """Return episodes and statistics as JSON text."""
        statistics = {name: getattr(self, name) for name in STATISTICS}
        return json.dumps(statistics | asdict(self), default=np.ndarray.tolist, allow_nan=False)

    def __str__(self) -> str:
        """Return mean, interval and success rate in one line, e.g. for ``print(report)``."""
        low, high = self.ci
        episodes = f"{self.episodes} episode{'s' * (self.episodes != 1)}"
        parts = [f"mean return {self.mean:.4g} over {episodes}", f"95% interval {low:.4g} to {high:.4g}"]
        if self.success_rate is not None:
            parts.append(f"success rate {self.success_rate:.1%}")
        if self.normalized_score is not None:
            parts.append(f"normalized score {self.normalized_score:.1f}")
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def table(self) -> Table:
        """Return the statistics as a table that ``print`` renders."""
        table = Table(title=f"Evaluation over {self.episodes} episodes", show_header=False)
        spread = f"{float(f'{self.std:.2g}'):.6g}"  # two significant digits, without an exponent
        table.add_row("mean return ± std", f"{self.mean:.4g} ± {spread}")
        table.add_row("95% interval of the mean", "{:.4g} to {:.4g}".format(*self.ci))
        table.add_row("interquartile mean", f"{self.iqm:.4g}")
        table.add_row("mean episode length", f"{self.mean_length:.4g}")
        if self.success_rate is not None:
            table.add_row("success rate", f"{self.success_rate:.1%}")
        if self.references is not None:
            table.add_row("normalized score", f"{self.normalized_score:.1f}")
            table.caption = _explain_scores(self.references)
        return table


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
    def labels(self) -> dict[float, str]:
        """Target -> its text with six digits; with all digits if another target has the same six."""
        short = {target: f"{target:g}" for target in self.reports}
        counts = Counter(short.values())
        return {target: text if counts[text] == 1 else repr(float(target)) for target, text in short.items()}

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
        return rank_correlation(self.targets, self.achieved)

    def scalars(self) -> dict[str, float]:
        """Return the value of each TensorBoard tag.

        The tags are those of `Report.scalars` for the first target; ``eval/target_{g}/return_mean``,
        ``return_iqm``, ``ci_low``, ``ci_high``, ``success_rate`` and ``normalized_score`` for each target g;
        and ``eval/spearman``.
        """
        values = self.first.scalars()
        labels = self.labels
        for target, report in self.reports.items():
            for tag, value in report.scalars().items():
                if tag != "eval/mean_ep_length":
                    name = TARGET_NAMES.get(tag, tag.removeprefix("eval/"))
                    values[f"eval/target_{labels[target]}/{name}"] = value
        return values if self.spearman is None else values | {"eval/spearman": self.spearman}

    def log(self, logger: Logger | SummaryWriter, step: int) -> None:
        """Write `scalars` at ``step`` to an SB3 logger or a TensorBoard writer, and flush it.

        TensorBoard gets only ``return_mean`` of each target. With several targets, it also gets `figure` as
        the image ``eval/targets``, and `markdown` as the text ``eval/target_table``.
        """
        if len(self.reports) > 1:
            if isinstance(logger, SummaryWriter):
                logger.add_figure("eval/targets", self.figure(), step, close=False)
                logger.add_text("eval/target_table", self.markdown(), step)
            elif writes_tensorboard(logger):
                figure = LoggedFigure(self.figure(), close=False)
                record_for_tensorboard(logger, "eval/targets", figure)
                record_for_tensorboard(logger, "eval/target_table", self.markdown())
        values = self.scalars()
        details = [tag for tag in values if re.search(r"^eval/target_.*/(?!return_mean$)", tag)]
        write_scalars(values, logger, step, not_in_tensorboard=details)

    def markdown(self) -> str:
        """Return `scalars` of all targets as a Markdown table with one row for each target."""
        columns = list(dict.fromkeys(tag for report in self.reports.values() for tag in report.scalars()))
        labels = self.labels
        lines = [["target", *(tag.removeprefix("eval/") for tag in columns)], ["---"] * (len(columns) + 1)]
        for target, report in self.reports.items():
            values = report.scalars()
            cells = (f"{values[tag]:.6g}" if tag in values else "" for tag in columns)
            lines.append([labels[target], *cells])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def to_json(self) -> str:
        """Return the targets with the content of `Report.to_json` as JSON text."""
        reports = [{"target": target} | json.loads(each.to_json()) for target, each in self.reports.items()]
        return json.dumps({"spearman": self.spearman, "data_range": self.data_range, "targets": reports})

    def __repr__(self) -> str:
        achieved = ", ".join(f"{target:g}: {report.mean:.4g}" for target, report in self.reports.items())
        return f"<{type(self).__name__}: mean return of each target {{{achieved}}}>"

    def table(self) -> Table:
        """Return a table with a row for each target, which ``print`` renders."""
        labels = self.labels
        by_name = {labels[target]: report for target, report in self.reports.items()}
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
        order = np.argsort(self.targets)
        targets, achieved = self.targets[order], self.achieved[order]
        low, high = np.array([report.ci for report in self.reports.values()])[order].T
        bars = np.stack([achieved - low, high - achieved])
        axes.axline((self.targets[0], self.targets[0]), slope=1, color="gray", linestyle="--", label="target")
        axes.errorbar(targets, achieved, bars, fmt="o-", capsize=3, label="mean, 95% interval")
        if self.data_range is not None:
            axes.axvspan(*self.data_range, color="tab:green", alpha=0.1, label="returns in the data")
        axes.set(xlabel="target return", ylabel="achieved return", title=self._correlation)
        axes.legend()
        return figure

    @property
    def _correlation(self) -> str:
        """Spearman's rank correlation in words; "" with fewer than three targets."""
        value = "undefined" if self.spearman is None else f"{self.spearman:.2f}"
        return "" if len(self.reports) < MIN_PAIRS else f"Spearman's rank correlation {value}"


COLUMNS = {
    "episodes": lambda report: str(report.episodes),
    "mean return": lambda report: f"{report.mean:.4g}",
    "95% interval": lambda report: "{:.4g} to {:.4g}".format(*report.ci),
    "IQM": lambda report: f"{report.iqm:.4g}",
    "success": lambda report: "" if report.success_rate is None else f"{report.success_rate:.1%}",
    "normalized score": lambda report: (
        "" if report.normalized_score is None else f"{report.normalized_score:.1f}"
    ),
}


def compare(
    reports: Mapping[str, Report], title: str = "Comparison of agents", heading: str = "agent"
) -> Table:
    """Return a printable table with a row per report: episodes, returns, success rate and score if available.

    Nothing is averaged over rows, so the table can compare the last and the best checkpoint of a run.

    Args:
        reports: reports by name, at least one.
        title: title of the table.
        heading: heading of the column of names.
    """
    columns = {name: cell for name, cell in COLUMNS.items() if any(map(cell, reports.values()))}
    table = Table(heading, *columns, title=title)
    for name, report in reports.items():
        table.add_row(name, *(cell(report) for cell in columns.values()))
    references = [report.references for report in reports.values() if report.references is not None]
    if references:
        table.caption = _explain_scores(references[0])
    return table


def _explain_scores(references: ReferenceScores) -> str:
    """Explain the scale of normalized scores and its source in one line."""
    low, high = references.minimum, references.maximum
    return f"normalized score: 0 is a return of {low:.6g}, 100 one of {high:.6g} ({references.source})"


def write_scalars(
    scalars: dict[str, float],
    logger: Logger | SummaryWriter,
    step: int,
    not_in_tensorboard: Collection[str] = (),
) -> None:
    """Write the value of each tag at ``step`` to an SB3 logger or a TensorBoard writer, and flush it.

    Args:
        scalars: value of each tag.
        logger: the logger or writer.
        step: number of steps or updates.
        not_in_tensorboard: tags that are written to other formats only.
    """
    if isinstance(logger, Logger):
        for tag, value in scalars.items():
            logger.record(tag, value, exclude="tensorboard" if tag in not_in_tensorboard else None)
        logger.record("time/total_timesteps", step, exclude="tensorboard")
        logger.dump(step)
    else:
        for tag in [tag for tag in scalars if tag not in not_in_tensorboard]:
            logger.add_scalar(tag, scalars[tag], step)
        logger.flush()
