"""``rlxf sweep``: search for hyperparameters of a training command with Optuna."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from rlxf.cli.job_options import check_same, needs_trust, read_options
from rlxf.cli.options import Command, check_counts, options

if TYPE_CHECKING:
    from rlxf.experiments.execution import Job
    from rlxf.experiments.study import SweepStudy
    from rlxf.experiments.sweep import TrialEnd
    from rlxf.experiments.sweep_plan import SweepPlan

STUDY_LOCK = ".study.lock"
"""Name of the lock file in the folder of a sweep."""
SAMPLES = 20
"""Number of random combinations of options, of which the command must accept one."""


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
        from rlxf.experiments.execution import check_replaceable, locked
        from rlxf.experiments.study import FILE as STUDY_FILE
        from rlxf.experiments.study import check_optuna, open_study, quiet
        from rlxf.experiments.sweep_plan import SweepPlan
        from rlxf.experiments.sweep_report import REPORT_FILES
        from rlxf.utils.files import make_folder

        check_counts(self, "trials", "processes", "threads")
        check_optuna()
        plan = SweepPlan.read(self.file)
        plan = plan if self.trials is None else replace(plan, trials=self.trials)
        self._check_options(plan)
        if self.storage is None and "?" in str(self.folder):
            raise ValueError(f"the path of the study must not contain a ?, got {self.folder}: use --output")
        check_replaceable(self.folder, REPORT_FILES, [self.folder / STUDY_LOCK, self.folder / STUDY_FILE])
        make_folder(self.folder, exist_ok=True)
        with locked(self.folder / STUDY_LOCK), quiet():  # Optuna creates its tables without a lock
            study = open_study(plan, self.folder, self.storage)
        return partial(self._run, plan, study)

    @property
    def folder(self) -> Path:
        """Folder of the sweep."""
        return Path("runs", self.file.stem) if self.output is None else self.output

    def _check_options(self, plan: "SweepPlan") -> None:
        """Raise ValueError unless the command accepts some combination of the options."""
        from rlxf.cli.config_values import COMMAND_LINE_ONLY

        if given := sorted({*COMMAND_LINE_ONLY} & {*plan.settings, *plan.space.options}):
            raise plan.refused(given[0], f"{given[0]} cannot be set in a sweep: write the options themselves")
        first = None
        for seed in range(SAMPLES):
            try:
                read_options(self._words(plan, plan.options(plan.space.draw(plan.fixed, seed))))
                return
            except ValueError as error:
                first = first or str(error)
        message = str(first)
        names = {*plan.space.options, *plan.fixed}
        found = [(at, -len(name), name) for name in names if (at := message.find(_option(name))) >= 0]
        raise plan.refused(min(found)[2] if found else None, f"no combination is accepted: {message}")

    def _words(self, plan: "SweepPlan", chosen: dict[str, Any]) -> list[str]:
        from rlxf.cli.config_file import to_arguments

        return [*plan.command.split(), *to_arguments(chosen)]

    def _job(self, plan: "SweepPlan", folder: Path, chosen: dict[str, Any], seed: int) -> "Job":
        """Return the run of a trial, after a check of its options."""
        from rlxf.cli.config_file import to_arguments
        from rlxf.experiments.execution import Job

        words = (*to_arguments(chosen), "--seed", str(seed))
        options = read_options([*plan.command.split(), *words])
        job = Job(str(folder), plan.command, words, needs_trust(options), self.threads)
        check_same(job, options, self.file)
        return job

    def _run(self, plan: "SweepPlan", study: "SweepStudy") -> None:
        from rlxf.cli.output import exit_with, print_out
        from rlxf.experiments import sweep
        from rlxf.experiments.study import StorageError, quiet, storage_errors

        with quiet():
            print_out(f"{len(study.trials())} of {plan.trials} trials: {self.folder}")
            work = sweep.Sweep(plan, study, self.folder, partial(self._job, plan), _print_end)
            try:
                work.run(self.processes)
            except StorageError:
                raise
            except BaseException:
                self._report(study)
                raise
            self._report(study)
            with storage_errors(study.place):
                states = {trial.state.name for trial in study.trials()}
        if not states & {"COMPLETE", "RUNNING", "WAITING"}:  # other machines may still train
            exit_with(f"no trial is complete; the reasons are in {self.folder / 'trials.md'}", 2)

    def _report(self, study: "SweepStudy") -> None:
        """Print the best trials, and write the files."""
        from rlxf.cli.config_file import to_arguments
        from rlxf.cli.output import print_out
        from rlxf.experiments.study import storage_errors
        from rlxf.experiments.sweep_report import MIN_IMPORTANCE, best_table, counts, write_report

        with storage_errors(study.place):
            if study.complete():
                print_out(best_table(study))
            print_out(counts(study))
        written = list(write_report(study, self.folder, to_arguments))  # outside: its errors are its own
        for path in written:
            print_out(f"written: {path}")
        if not any(path.name == "importance.png" for path in written):
            print_out(
                f"no importance of options: it needs {MIN_IMPORTANCE} complete trials with different values"
            )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _print_end(end: "TrialEnd") -> None:
    """Print a line about a trial that has ended."""
    from rlxf.cli.output import print_out
    from rlxf.experiments.sweep_report import describe

    result = (
        f"{end.value:.4g}" if end.value is not None else f"failed: {end.reason}" if end.reason else end.state
    )
    print_out(f"trial {end.number}: {result} after {end.seconds:.0f} s: {describe(end.options)}")
