"""The last checkpoint of a run and the best one: side by side, never mixed."""

from collections.abc import Mapping
from pathlib import Path

from rlxf.cli.screen import show
from rlxf.evaluation import Report, TargetSweep
from rlxf.training import RunFolder
from rlxf.utils.tables import Table

REMEMBERING = ", remembering"
"""Behind the name of a checkpoint that remembers trajectories."""
FOLDERS = {
    "last": "evaluation",
    "best": "evaluation-best",
    f"last{REMEMBERING}": "evaluation-remembering",
    f"best{REMEMBERING}": "evaluation-best-remembering",
}
"""Where the numbers of each go in the folder of the run: one run each in TensorBoard."""
HEADINGS = {
    "last": "Last checkpoint, step {:,}",
    "best": "Best checkpoint, step {:,}, chosen by other episodes during training",
    f"last{REMEMBERING}": "Last checkpoint, step {:,}, remembering",
    f"best{REMEMBERING}": "Best checkpoint, step {:,}, remembering",
}


def checkpoints_of(run: RunFolder) -> dict[str, Path]:
    """ "last" -> where it is; and "best", if evaluations chose one while the agent learned."""
    last = {"last": run.checkpoint}
    return last | {"best": run.best} if run.best.is_file() else last


def chosen(run: RunFolder, which: str) -> dict[str, Path]:
    """Return `checkpoints_of` a run, or only the one of this name, "last" or "best"; "all" for all of them.

    Raises:
        FileNotFoundError: if "best" is requested and there is none.
    """
    files = checkpoints_of(run)
    if which == "all":
        return files
    if which not in files:
        raise FileNotFoundError(
            f"{run.path} has no {run.best.name}: it was trained without evaluations; evaluate the last "
            f"checkpoint, --checkpoint last"
        )
    return {which: files[which]}


def tables(reports: Mapping[str, Report | TargetSweep], steps: Mapping[str, int]) -> list[Table]:
    """One for each checkpoint that was evaluated, with its name.

    Args:
        reports: by the name of the checkpoint.
        steps: steps of training before each.
    """
    shown = [report.table() for report in reports.values()]
    for table, name in zip(shown, reports, strict=True):
        table.title = f"{HEADINGS[name].format(steps[name])}\n{table.title}"
    return shown


def draw_targets(reports: Mapping[str, Report | TargetSweep], folders: Mapping[str, Path]) -> None:
    """Draw requested against achieved returns where several were asked for, and say where the pictures are.

    Args:
        reports: by the name of the checkpoint.
        folders: where the picture of each goes, ``targets.png``.
    """
    for name, report in reports.items():
        if isinstance(report, TargetSweep) and len(report.reports) > 1:
            path = folders[name] / "targets.png"
            report.plot(path)
            show(f"requested and achieved: {path}")
