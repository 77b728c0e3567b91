"""Options of the commands that compare runs, and the groups of runs that they select."""

from abc import ABC
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from rlxf.cli.options import Command, options
from rlxf.cli.output import print_out

if TYPE_CHECKING:
    from rlxf.experiments.groups import Group


@options
class RunsCommand(Command, ABC):
    """Base class of the commands that compare runs."""

    runs: Positional[tuple[Path, ...]]
    """Folders of runs, folders that contain such folders, or log files: progress.csv, *.monitor.csv and
    evaluations.npz of Stable-Baselines3, or a CSV file with a column of steps."""
    metric: str | None = None
    """Name of the metric in the logs. None means eval/mean_reward, or rollout/ep_rew_mean if there are no
    evaluations."""
    groups: tuple[str, ...] = ()
    """Groups of runs as NAME=PATTERN, where the pattern is that of a path, such as ppo='*/ppo-*'.
    By default, runs whose settings differ by the seed only are one group."""

    def read_groups(self) -> "tuple[str, list[Group]]":
        """Return the metric and the groups, and print the metric if it was not given.

        Raises:
            ValueError, OSError: if an option is invalid or a log is damaged.
        """
        from rlxf.experiments.groups import choose_metric, parse_patterns, read_groups
        from rlxf.experiments.runs import find_runs

        if not self.runs:
            raise ValueError("no runs given; give folders of runs, e.g. rlxf plot runs")
        patterns = parse_patterns(self.groups)
        runs = find_runs(self.runs)
        metric = choose_metric(runs, self.metric)
        found = read_groups(runs, metric, patterns)
        if self.metric is None:
            print_out(f"metric: {metric}; choose another one with --metric")
        return metric, found
