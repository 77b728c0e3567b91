"""Run of a sweep: checks of its options, trials in processes, printed results and written files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlxf.cli.config_file import to_arguments
from rlxf.cli.config_values import COMMAND_LINE_ONLY
from rlxf.cli.job_options import (
    check_same,
    is_about_one_option,
    make_job,
    named_option,
    read_settings,
    unknown_option,
)
from rlxf.cli.output import exit_with, print_out
from rlxf.experiments.execution import check_replaceable, locked
from rlxf.experiments.jobs import Job
from rlxf.experiments.search_space import Case
from rlxf.experiments.study import FILE as STUDY_FILE
from rlxf.experiments.study import StorageError, SweepStudy, open_study, quiet, storage_errors
from rlxf.experiments.sweep import TrialEnd, TrialRunner
from rlxf.experiments.sweep_plan import SweepPlan
from rlxf.experiments.sweep_report import (
    REPORT_FILES,
    best_table,
    counts,
    describe,
    importance_advice,
    write_report,
)
from rlxf.experiments.toml_files import PlanError
from rlxf.utils.files import make_folder
from rlxf.utils.warnings import warn_user

STUDY_LOCK = ".study.lock"
"""Name of the lock file in the folder of a sweep."""
SAMPLES = 20
"""Maximum number of random combinations of options, of which the command should accept one. Those with one
choice of an option are as many."""


@dataclass(frozen=True)
class SweepRun:
    """Trials of a sweep on this machine.

    Args:
        plan: content of the sweep file.
        folder: folder of the sweep.
        processes: number of trials at the same time.
        threads: number of threads of each run.
    """

    plan: SweepPlan
    folder: Path
    processes: int
    threads: int

    def check_options(self) -> None:
        """Check that the command accepts each choice, and each option, in some combination.

        Raises:
            PlanError: if it refuses one because of an unknown or invalid option, whatever the others are.

        Warns:
            UserWarning: if it refuses one in all drawn combinations, but other combinations may be possible.
        """
        plan = self.plan
        if given := sorted({*COMMAND_LINE_ONLY} & {*plan.settings, *plan.space.options}):
            raise plan.refused(given[0], f"{given[0]} cannot be set in a sweep: write the options themselves")
        first = self._accepted_seed(range(SAMPLES))
        if first is None:
            return
        seeds = [first, *(seed for seed in range(SAMPLES) if seed != first)]
        accepted = plan.space.cases_in(plan.space.draw(plan.fixed, first))
        for case in plan.space.cases(plan.fixed):
            if case not in accepted and (seed := self._accepted_seed(seeds, case)) is not None:
                accepted |= plan.space.cases_in(plan.space.draw(plan.fixed, seed, case))

    def _accepted_seed(self, seeds: Sequence[int], case: Case | None = None) -> int | None:
        """Return the first of several seeds for which the command accepts the draw, in which the case occurs.

        Raises:
            PlanError: if it accepts none because of an unknown or invalid option.

        Warns:
            UserWarning: if it accepts none for another reason; the result is None.
        """
        errors = []
        for seed in seeds:
            try:
                self._read_options(self.plan.space.draw(self.plan.fixed, seed, case))
                return seed
            except ValueError as error:
                errors.append(error)
        if not any(map(self._depends_on_others, errors)):
            raise self._refused(errors[0], case)
        warn_user(
            f"{self.plan.path}: the command refuses {len(errors)} random combinations{_with(case)}, so most "
            f"of such trials will fail: {errors[-1]}"
        )
        return None

    def _read_options(self, chosen: dict[str, Any]) -> None:
        """Raise ValueError if the command refuses a combination of options."""
        read_settings(self.plan.command, self.plan.options(chosen))

    def _depends_on_others(self, error: ValueError) -> bool:
        """Return whether the same values may be accepted together with other values.

        An option of a technique is unknown if another technique is drawn.
        """
        searched = self.plan.space.options
        unknown = unknown_option(error) or ""
        technique = unknown.rpartition(".")[0]
        if unknown in searched and technique in searched:
            return technique not in searched[unknown].when
        return not is_about_one_option(error)

    def _refused(self, error: ValueError, case: Case | None) -> PlanError:
        """Return the error of all combinations, or of those in which a case occurs."""
        if case is None:
            name = named_option(error, {*self.plan.space.options, *self.plan.fixed})
            return self.plan.refused(name, str(error))
        name = named_option(error, self.plan.space.options) or case[0]
        message = f"no combination{_with(case)} is accepted: {error}"
        return self.plan.refused(f"search.{name}", message)

    def open_study(self, storage: str | None) -> SweepStudy:
        """Make the folder, and open the study.

        Args:
            storage: URL of a database, or path of a journal file; None for a file in the folder.

        Raises:
            ValueError, OSError: if the study cannot be opened, or files would be replaced.
        """
        if storage is None and "?" in str(self.folder):
            raise ValueError(f"the path of the study must not contain a ?, got {self.folder}: use --output")
        check_replaceable(self.folder, REPORT_FILES, [self.folder / STUDY_LOCK, self.folder / STUDY_FILE])
        make_folder(self.folder, exist_ok=True)
        with locked(self.folder / STUDY_LOCK), quiet():  # Optuna creates its tables without a lock
            return open_study(self.plan, self.folder, storage)

    def train(self, study: SweepStudy) -> None:
        """Train the missing trials, print their results, and write the files."""
        with quiet():
            print_out(f"{len(study.trials())} of {self.plan.trials} trials: {self.folder}")
            try:
                TrialRunner(self.plan, study, self.folder, self._job, _print_end).run(self.processes)
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

    def _job(self, folder: Path, chosen: dict[str, Any], seed: int) -> Job:
        """Return the run of a trial, after a check of its options."""
        settings = {**chosen, "seed": seed}
        options = read_settings(self.plan.command, settings)
        job = make_job(folder, self.plan.command, settings, options, self.threads)
        check_same(job, options, self.plan.path)
        return job

    def _report(self, study: SweepStudy) -> None:
        """Print the best trials, and write the files."""
        with storage_errors(study.place):
            if study.complete():
                print_out(best_table(study))
            print_out(counts(study))
        written = list(write_report(study, self.folder, to_arguments))  # outside: its errors are its own
        for path in written:
            print_out(f"written: {path}")
        if not any(path.name == "importance.png" for path in written):
            with storage_errors(study.place):
                print_out(f"no importance of options: {importance_advice(study)}")


def _with(case: Case | None) -> str:
    """Return the part of a message that names an option with its choice; empty without a case."""
    if case is None:
        return ""
    option, chosen = case
    return f" with {option}" if chosen is None else f" with {option} = {chosen!r}"


def _print_end(end: TrialEnd) -> None:
    """Print a line about a trial that has ended."""
    result = (
        f"{end.value:.4g}" if end.value is not None else f"failed: {end.reason}" if end.reason else end.state
    )
    print_out(f"trial {end.number}: {result} after {end.seconds:.0f} s: {describe(end.options)}")
