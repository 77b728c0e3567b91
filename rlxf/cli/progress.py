"""Progress display of training: a line every few seconds, or a panel on a terminal."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter
from stable_baselines3.common.utils import safe_mean

from rlxf.cli.output import PipeSafeConsole, live_block, print_out
from rlxf.evaluation import EvaluationCallback, TargetSweep
from rlxf.evaluation.periodic import PeriodicCallback

LINE_SECONDS = 5.0
"""Seconds between two progress lines if the output is not a terminal."""
PANEL_SECONDS = 0.5
"""Seconds between two refreshes of the panel on a terminal."""
NUMBERS = (int, float, np.number)
ONLINE_METRICS = {
    "explained variance": ("train/explained_variance", 1),
    "entropy": ("train/entropy_loss", -1),
    "stage": ("curriculum/stage", 1),
}
"""Metrics of an online training: label -> tag in the log, and a factor."""
OFFLINE_METRICS = {"loss": ("train/loss", 1), "validation loss": ("validation/loss", 1)}
"""Metrics of an offline training: label -> tag in the log, and a factor."""


@dataclass(frozen=True)
class ProgressState:
    """Current state of training.

    Args:
        unit: unit of progress, "steps" or "updates".
        done: number of completed steps or updates.
        total: total number, rounded up to whole rollouts or updates.
        per_second: rate since the training was started or resumed, without `evaluation_seconds`.
        metrics: texts of the metrics, e.g. of returns and losses, each with its label.
        evaluation: the last evaluation and the best; "" before the first.
        evaluation_seconds: time of evaluations and videos since the training was started or resumed.
    """

    unit: str
    done: int
    total: int
    per_second: float
    metrics: Sequence[str] = ()
    evaluation: str = ""
    evaluation_seconds: float = 0.0

    @property
    def remaining(self) -> str:
        """Remaining time at this rate, without further evaluations, as hours, minutes and seconds."""
        seconds = (self.total - self.done) / self.per_second if self.per_second else 0.0
        return f"{timedelta(seconds=round(max(seconds, 0.0)))} left"

    @property
    def evaluating(self) -> str:
        """Time of evaluations and videos as hours, minutes and seconds; "" if there were none."""
        seconds = timedelta(seconds=round(self.evaluation_seconds))
        return f"evaluations took {seconds}" if self.evaluation_seconds else ""

    @property
    def count(self) -> str:
        """Completed and total steps or updates."""
        return f"{self.unit} {self.done:,}/{self.total:,}"

    @property
    def rate(self) -> str:
        """Steps or updates per second."""
        return f"{self.per_second:,.{0 if self.per_second >= 10 else 1}f} {self.unit}/s"


class LineDisplay:
    """Display that prints one line per state, for log files."""

    every_seconds = LINE_SECONDS

    def show(self, state: ProgressState) -> None:
        """Print the state as one line."""
        parts = [state.count, *state.metrics, state.rate, state.remaining]
        print_out(" | ".join(filter(None, [*parts, state.evaluating, state.evaluation])))


class PanelDisplay:
    """Display of up to three lines on a terminal, redrawn in place."""

    every_seconds = PANEL_SECONDS

    def __init__(self, live: Live):
        self._live = live

    def show(self, state: ProgressState) -> None:
        """Redraw the panel."""
        self._live.update(_block(state), refresh=True)


def _block(state: ProgressState) -> Group:
    head = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=state.total, completed=state.done, width=24, finished_style="green")
    head.add_row(state.count, bar, state.rate, state.remaining)
    evaluation = "; ".join(filter(None, (state.evaluation, state.evaluating)))
    lines = ["   ".join(state.metrics), evaluation]
    return Group(head, *(Text(line) for line in lines if line))


ProgressDisplay = LineDisplay | PanelDisplay


@contextmanager
def open_display() -> Iterator[ProgressDisplay]:
    """Yield a `PanelDisplay` if the standard output is a terminal, else `LineDisplay`."""
    if sys.stdout.isatty() and PipeSafeConsole().is_interactive:
        with live_block() as live:
            yield PanelDisplay(live)
    else:
        yield LineDisplay()


class LatestValues(KVWriter):
    """Logger output that keeps the newest value of each tag."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Store the numeric values."""
        self.values |= {tag: value for tag, value in key_values.items() if isinstance(value, NUMBERS)}

    def close(self) -> None:
        """Do nothing, because there is no file to close."""


class Progress(BaseCallback):
    """Show the progress of training every few seconds, after each evaluation, and at the end.

    The last step is shown at the end only, with the metrics of the last update. The callback uses no random
    numbers and does not affect training or logs.

    Args:
        display: where the progress is shown.
        unit: unit of progress, "steps" or "updates".
        total: total number of steps or updates.
        metrics: logged metrics to show, `ONLINE_METRICS` or `OFFLINE_METRICS`.
        callbacks: callbacks of the training that are called before this one. The time of evaluations and
            videos among them is shown separately from that of the training.
    """

    def __init__(
        self,
        display: ProgressDisplay,
        unit: str,
        total: int,
        metrics: dict[str, tuple[str, int]],
        callbacks: Iterable[BaseCallback] = (),
    ):
        super().__init__()
        self.display = display
        self.unit = unit
        self.total = total
        self.metrics = metrics
        self._periodic = [each for each in callbacks if isinstance(each, PeriodicCallback)]
        evaluations = (each for each in self._periodic if isinstance(each, EvaluationCallback))
        self.evaluation = next(evaluations, None)
        self._latest = LatestValues()

    def _on_training_start(self) -> None:
        self.logger.output_formats.append(self._latest)
        self._began, self._before = time.monotonic(), self.model.num_timesteps
        self._shown_at, self._shown = self._began, (-1, self._evaluation_text)

    def _on_step(self) -> bool:
        due = time.monotonic() - self._shown_at >= self.display.every_seconds
        if (due or self._evaluation_text != self._shown[1]) and self.num_timesteps < self.total:
            self._show()
        return True

    def _on_training_end(self) -> None:
        self._show()
        self.logger.output_formats.remove(self._latest)

    @property
    def _evaluation_text(self) -> str:
        return "" if self.evaluation is None else describe_evaluation(self.evaluation, self.unit)

    def _show(self) -> None:
        self._shown_at, state = time.monotonic(), self._state()
        if (state.done, state.evaluation) != self._shown:
            self._shown = state.done, state.evaluation
            self.display.show(state)

    def _state(self) -> ProgressState:
        done = self.model.num_timesteps
        evaluation_seconds = sum(each.seconds for each in self._periodic)
        seconds = max(time.monotonic() - self._began - evaluation_seconds, 1e-9)
        return ProgressState(
            self.unit,
            done,
            max(self.total, done),
            (done - self._before) / seconds,
            self._metrics(),
            self._evaluation_text,
            evaluation_seconds,
        )

    def _metrics(self) -> list[str]:
        """Return the metrics of the last training episodes, by default 100, and the logged metrics."""
        episodes, successes = self.model.ep_info_buffer, self.model.ep_success_buffer
        texts = [f"return {safe_mean([each['r'] for each in episodes]):.4g}"] if episodes else []
        texts += [f"success {safe_mean(successes):.1%}"] if successes else []
        logged = self._latest.values | dict(self.logger.name_to_value)
        shown = {label: place for label, place in self.metrics.items() if place[0] in logged}
        return texts + [f"{label} {factor * logged[tag]:.3g}" for label, (tag, factor) in shown.items()]


def describe_evaluation(evaluation: EvaluationCallback, unit: str) -> str:
    """Return the text of the last evaluation, at each target return if there are any, and of the best one.

    Args:
        evaluation: callback of the evaluations.
        unit: unit of progress, "steps" or "updates".
    """
    last, at = evaluation.last, f"at {unit.removesuffix('s')}"
    has_best = evaluation.best is not None
    best = f"best return {evaluation.best:.4g} {at} {evaluation.best_step:,}" if has_best else ""
    if last is None:
        return best
    returns = [f"return {last.mean:.4g}"]
    if isinstance(last, TargetSweep):
        reports = last.reports.items()
        returns = [f"target {target:g}, return {report.mean:.4g}" for target, report in reports]
    return f"evaluation {at} {max(evaluation.reports):,}: {'; '.join([*returns, best])}"


@contextmanager
def progress(
    enabled: bool,
    unit: str,
    total: int,
    metrics: dict[str, tuple[str, int]],
    callbacks: Iterable[BaseCallback] = (),
) -> Iterator[list[BaseCallback]]:
    """Yield a list with the callback that shows progress, or an empty list.

    Args:
        enabled: whether progress is shown.
        unit, total, metrics, callbacks: as in `Progress`.
    """
    if not enabled:
        yield []
        return
    with open_display() as display:
        yield [Progress(display, unit, total, metrics, callbacks)]
