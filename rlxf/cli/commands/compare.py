"""``rlxf compare``: tables of the final scores of runs."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlxf.cli.options import check_counts, check_figure_path, options
from rlxf.cli.output import console, print_out
from rlxf.cli.run_groups import RunsCommand

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rlxf.experiments.comparison import GroupScores

SUFFIXES = (".csv", ".md", ".json")


@options
class Compare(RunsCommand):
    """Compare the final scores of runs over seeds, in one table for each task.

    Runs whose settings differ by the seed only are one row. The score of a run is the last value of the
    metric. The table has the mean, the interquartile mean (IQM) and the median over seeds with 95% bootstrap
    intervals, the area under the curve (AUC) divided by its steps, and the probability that a seed of the
    first group scores higher than one of this group.

    Example: rlxf compare runs --output comparison.md
    """

    last: int = 1
    """Number of values at the end of each run whose mean is its score."""
    output: Path | None = None
    """File of the tables, which ends in .csv, .md or .json. An existing file is replaced.
    None means no file."""
    plot: Path | None = None
    """File of a plot of the scores, which ends in .png, .pdf or .svg. None means no plot."""

    def prepare(self) -> Callable[[], None]:
        """Read the logs, compute the statistics, and return the function that prints and writes them."""
        from rlxf.experiments.comparison import by_task, compare_groups
        from rlxf.experiments.figures import FORMATS, final_score_figure

        check_counts(self, "last")
        if self.output is not None:
            self._check_output(self.output)
        if self.plot is not None:
            check_figure_path("--plot", self.plot, FORMATS)
        metric, groups = self.read_groups()
        tasks = [compare_groups(members, metric, self.last) for members in by_task(groups).values()]
        figure = None if self.plot is None else final_score_figure(groups, metric, self.last)
        return partial(self._show, metric, tasks, figure)

    def _show(self, metric: str, tasks: "Sequence[Sequence[GroupScores]]", figure: "Figure | None") -> None:
        from rlxf.experiments.comparison import comparison_table, write_comparison
        from rlxf.experiments.figures import save_figure

        for rows in tasks:
            table = comparison_table(rows, metric, self.last)
            print_out(table if console().is_terminal else str(table))
        if self.output is not None:
            write_comparison(self.output, tasks, metric, self.last)
            print_out(f"comparison: {self.output}")
        if self.plot is not None and figure is not None:
            save_figure(figure, self.plot)
            print_out(f"plot of scores: {self.plot}")

    def _check_output(self, path: Path) -> None:
        """Raise ValueError unless tables can be written to this path. Files of runs are not replaced."""
        from rlxf.experiments.runs import is_run

        if path.suffix.lower() not in SUFFIXES or path.is_dir():
            raise ValueError(f"--output must be a file name that ends in {', '.join(SUFFIXES)}, got {path}")
        if not path.parent.is_dir():
            raise ValueError(
                f"--output must be in an existing folder, got {path}: create {path.parent} first"
            )
        is_input = path.resolve() in [run.resolve() for run in self.runs]
        if path.exists() and (is_input or is_run(path.parent)):
            raise ValueError(f"--output {path} exists and belongs to a run; choose another file")
