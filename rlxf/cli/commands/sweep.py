"""``rlxf sweep``: search for hyperparameters of a training command with Optuna."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from tyro.conf import Positional

from rlxf.cli.options import Command, check_counts, check_output_folder, options


@options
class Sweep(Command):
    """Search for hyperparameters of a training command with Optuna.

    The file is TOML: a "command" such as "train gtrxl", its fixed options in a table [settings], and the
    options to search in a table [search], each with a list of choices or with a range such as { low = 1,
    high = 8 }. space = "gtrxl" or "dt" selects a search space of the package. The sampler is TPE. Trials
    whose learning curve is worse than the median of earlier trials are stopped early.

    The folder contains the runs (trial-NUMBER/seed-SEED), trials.md, best.toml, history.png and
    importance.png. The same command continues a sweep that was interrupted. Several processes and machines
    share a sweep by means of the folder or of --storage. Needs the extra "sweep".

    Example: rlxf sweep sweep.toml --processes 2
    """

    file: Positional[Path]
    """Sweep file."""
    output: Path | None = None
    """Folder of the sweep. None means runs/NAME for the file NAME.toml."""
    trials: int | None = None
    """Number of trials of the study, over all processes. None means that of the file, or 20."""
    processes: int = 1
    """Number of trials that are trained at the same time on this machine."""
    threads: int = 1
    """Number of threads of each run."""
    storage: str | None = None
    """Storage of the study: the URL of a database, e.g. postgresql://USER@HOST/NAME, or the path of a journal
    file, which suits network file systems. None means the SQLite file study.db in the folder."""

    def prepare(self) -> Callable[[], None]:
        """Read the file, check its options, open the study, and return the function that trains."""
        from rlxf.cli.sweep_run import SweepRun
        from rlxf.experiments.study import check_optuna
        from rlxf.experiments.sweep_file import read_sweep_plan

        check_counts(self, "trials", "processes", "threads")
        check_output_folder(self.folder)
        check_optuna()
        plan = read_sweep_plan(self.file)
        plan = plan if self.trials is None else replace(plan, trials=self.trials)
        run = SweepRun(plan, self.folder, self.processes, self.threads)
        run.check_options()
        return partial(run.train, run.open_study(self.storage))

    @property
    def folder(self) -> Path:
        """Folder of the sweep."""
        return Path("runs", self.file.stem) if self.output is None else self.output
