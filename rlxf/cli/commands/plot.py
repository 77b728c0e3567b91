"""``rlxf plot``: learning curves of runs."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlxf.cli.options import check_counts, check_figure_path, options
from rlxf.cli.output import print_out
from rlxf.cli.run_groups import RunsCommand

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rlxf.experiments.groups import Group


@options
class Plot(RunsCommand):
    """Plot learning curves of runs, with 95% intervals over seeds.

    Runs whose settings differ by the seed only are one line, their mean. The labels name the settings that
    differ between the lines. Each task has its own panel. A line ends at the last step that all of its seeds
    reached; a run that ended early by --stop-return keeps its last value. Runs that did not end are counted
    in the legend, and are part of a line only if no run of the line ended.

    Example: rlxf plot runs --output learning-curves.png
    """

    output: Path = Path("plot.png")
    """File of the plot, which ends in .png, .pdf or .svg. An existing file is replaced."""
    smooth: int = 1
    """Number of last values of a run whose mean is shown. 1 shows the values themselves."""

    def prepare(self) -> Callable[[], None]:
        """Read the logs, draw the plot, and return the function that writes it."""
        from rlxf.experiments.figures import FORMATS, learning_curves

        check_counts(self, "smooth")
        check_figure_path("--output", self.output, FORMATS)
        metric, groups = self.read_groups()
        groups = [group.finished_only().smooth(self.smooth) for group in groups]
        lines = [_last_value(group, metric) for group in groups]
        return partial(self._write, learning_curves(groups, metric), lines)

    def _write(self, figure: "Figure", lines: Sequence[str]) -> None:
        from rlxf.experiments.figures import save_figure

        save_figure(figure, self.output)
        print_out(f"plot of learning curves: {self.output}")
        for line in lines:
            print_out(line)


def _last_value(group: "Group", metric: str) -> str:
    """Return the end of the line of a group as text: number of seeds, mean and interval."""
    from rlxf.evaluation.aggregates import mean_score
    from rlxf.experiments.comparison import describe_seeds, format_interval
    from rlxf.experiments.curves import common_steps, interpolate

    seeds = len(group.curves)
    name = f"{', '.join(filter(None, (group.task, group.label)))}: {describe_seeds(group)}"
    curves = group.lines(metric)
    first, last = common_steps(curves)
    if first > last:
        return f"{name}, without a line, because no step is in the logs of all seeds"
    mean = mean_score([interpolate(curves, [last])[:, 0]])
    held = sum(bool(own.steps[-1] < last) for own in group.curves)
    text = f"{name}, {metric} {format_interval(mean, seeds)} at step {last:,.0f}"
    return f"{text}, with the last value of {held} that ended early" if held else text
