"""Names, output folders and reports of the last and the best checkpoint of a run."""

from collections.abc import Mapping
from pathlib import Path

from rlxf.cli.screen import show
from rlxf.evaluation import Report, TargetSweep
from rlxf.training import RunFolder
from rlxf.utils.tables import Table

REMEMBERING = ", remembering"
"""Suffix of the name of a checkpoint with a datastore of trajectories."""
FOLDERS = {
    "last": "evaluation",
    "best": "evaluation-best",
    f"last{REMEMBERING}": "evaluation-remembering",
    f"best{REMEMBERING}": "evaluation-best-remembering",
}
"""Checkpoint name -> subfolder of its evaluation logs; each is a separate run in TensorBoard."""
HEADINGS = {
    "last": "Last checkpoint, step {:,}",
    "best": "Best checkpoint, step {:,}, selected on other episodes during training",
    f"last{REMEMBERING}": "Last checkpoint, step {:,}, with a datastore of trajectories",
    f"best{REMEMBERING}": "Best checkpoint, step {:,}, with a datastore of trajectories",
}
"""Checkpoint name -> title of its report."""


def checkpoints_of(run: RunFolder) -> dict[str, Path]:
    """Return name -> path of the checkpoints: "last", and "best" if evaluations selected one."""
    last = {"last": run.checkpoint}
    return last | {"best": run.best} if run.best.is_file() else last


def chosen(run: RunFolder, which: str) -> dict[str, Path]:
    """Return name -> path of the selected checkpoints of a run.

    Args:
        run: the run.
        which: "last", "best", or "all" for those of `checkpoints_of`.

    Raises:
        FileNotFoundError: if "best" is requested and there is none.
    """
    files = checkpoints_of(run)
    if which == "all":
        return files
    if which not in files:
        raise FileNotFoundError(
            f"{run.path} has no {run.best.name}: it was trained without evaluations; evaluate the last "
            f"checkpoint with --checkpoint last"
        )
    return {which: files[which]}


def tables(reports: Mapping[str, Report | TargetSweep], steps: Mapping[str, int]) -> list[Table]:
    """Return one table per evaluated checkpoint, titled with its name.

    Args:
        reports: checkpoint name -> report.
        steps: checkpoint name -> training steps.
    """
    rendered = [report.table() for report in reports.values()]
    for table, name in zip(rendered, reports, strict=True):
        table.title = f"{HEADINGS[name].format(steps[name])}\n{table.title}"
    return rendered


def draw_targets(reports: Mapping[str, Report | TargetSweep], folders: Mapping[str, Path]) -> None:
    """Plot achieved against requested returns of reports with several targets, and print the paths.

    Args:
        reports: checkpoint name -> report.
        folders: checkpoint name -> folder of its plot, ``targets.png``.
    """
    for name, report in reports.items():
        if isinstance(report, TargetSweep) and len(report.reports) > 1:
            path = folders[name] / "targets.png"
            report.plot(path)
            show(f"plot of requested and achieved returns: {path}")
