"""``rlxf experiment``: agents on tasks with several seeds, and one table of their results."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from rlxf.cli.job_options import check_same, make_job, read_settings, with_absolute_paths
from rlxf.cli.options import Command, check_counts, check_output_folder, options
from rlxf.experiments.columns import listed
from rlxf.utils.warnings import warn_user

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from rlxf.experiments.jobs import Job, Outcome
    from rlxf.experiments.plan import Cell, Plan


@options
class Experiment(Command):
    """Train the agents of an experiment file on its tasks with several seeds, and compare them in one table.

    The file is TOML. It has tables [tasks.NAME] with an environment or with datasets, tables [agents.NAME]
    with a command, such as "train gtrxl" or "baseline ppo", and the options of the commands. The number of
    seeds is "seeds". Only runs that are missing are trained; interrupted ones are resumed. A run that fails
    does not end the others, and is tried again by the next call.

    The folder contains the runs (TASK/AGENT/seed-N), table.md, results.json, curves.png and, for tasks with a
    score_range, profile.png. "tensorboard --logdir FOLDER" shows all runs. With --tasks or --agents,
    tables, results.json and figures contain the selected runs, and replace those of earlier calls.

    Example: rlxf experiment memory.toml --processes 2
    """

    file: Positional[Path]
    """Experiment file."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks to train on and to compare. Empty means all tasks of the file."""
    agents: tuple[str, ...] = ()
    """Names of the agents to train and to compare. Empty means all agents of the file."""
    output: Path | None = None
    """Folder of the experiment. None means runs/NAME for the file NAME.toml."""
    processes: int = 1
    """Number of runs that are trained at the same time on this machine."""
    threads: int = 1
    """Number of threads of each run."""
    scheduler: str | None = None
    """Address of a scheduler of dask.distributed, e.g. tcp://10.0.0.1:8786, whose workers train the runs in
    place of this machine. They need the folder of the experiment, and the paths of "config" and
    "pretrained", at the same place, and the extra "experiment"."""

    def prepare(self) -> Callable[[], None]:
        """Read the file, check the options of all runs, and return the function that trains them."""
        from rlxf.experiments.experiment_file import read_plan
        from rlxf.experiments.results import read_results

        check_counts(self, "processes", "threads")
        check_output_folder(self.folder)
        if self.scheduler is not None and self.processes != 1:
            raise ValueError(
                "--processes is for this machine, and with --scheduler its workers train: omit it, and start "
                "workers with as many threads as runs"
            )
        complete = read_plan(self.file)
        plan = complete.selection(self.tasks, self.agents)
        options = self._read_options(plan)
        jobs = []
        for cell in plan.cells():
            given = options[cell.task, cell.agent]
            job = self._job(cell, given)
            check_same(job, given, self.file)
            jobs.append((cell, job))
        self._check_results(complete, jobs)
        read_results(plan, jobs, {})  # so that a damaged file is named before the first training
        return partial(self._run, plan, jobs)

    def _check_results(self, plan: "Plan", jobs: "list[tuple[Cell, Job]]") -> None:
        """Check the result files in the folder, which will be replaced; ``plan`` is that of the whole file.

        Raises:
            ValueError: if they are not those of an experiment.

        Warns:
            UserWarning: if they have results of other tasks, agents or seeds.
        """
        from rlxf.experiments.execution import FOLDER_LOCK, check_replaceable
        from rlxf.experiments.plan import RESULT_FILES
        from rlxf.experiments.summary import other_results

        markers = [self.folder / FOLDER_LOCK, *(job.sibling("json") for _, job in jobs)]
        check_replaceable(self.folder, RESULT_FILES, markers)
        if outside := other_results(self.folder, plan.cells()):
            warn_user(
                f"{self.folder} has results of {listed(outside, 3)}, which {self.file} does not name: their "
                f"runs are kept, but the new tables lack them; choose another folder with --output"
            )

    @property
    def folder(self) -> Path:
        """Folder of the experiment; absolute with ``scheduler``, as workers may have another directory."""
        folder = Path("runs", self.file.stem) if self.output is None else self.output
        return folder if self.scheduler is None else folder.absolute()

    def _job(self, cell: "Cell", options: dict[str, Any]) -> "Job":
        settings = {**with_absolute_paths(cell.settings), "seed": cell.seed}
        return make_job(self.folder / cell.name, cell.command, settings, options, self.threads)

    def _read_options(self, plan: "Plan") -> dict[tuple[str, str], dict[str, Any]]:
        """Return (task, agent) -> options of its runs; raise PlanError if they are invalid.

        Warns:
            UserWarning: if options of all runs replace those of a settings file of an agent.
        """
        from rlxf.cli.experiment_errors import refused_options, warn_about_replaced_settings

        options = {}
        for task, agent in plan.pairs():
            try:
                settings = with_absolute_paths(plan.options(task, agent))
                options[task.name, agent.name] = read_settings(agent.command, settings)
            except ValueError as error:
                raise refused_options(self.file, plan, task, agent, error) from None
        warn_about_replaced_settings(self.file, plan)
        return options

    def _run(self, plan: "Plan", jobs: "list[tuple[Cell, Job]]") -> None:
        from rlxf.cli.experiment_errors import warn_about_environments
        from rlxf.cli.output import exit_with, print_out
        from rlxf.experiments.execution import only_process, run_job, run_jobs
        from rlxf.experiments.jobs import is_complete
        from rlxf.experiments.results import read_results
        from rlxf.experiments.summary import Summary, write_summary

        with only_process(self.folder):
            complete = [job for _, job in jobs if is_complete(job)]
            done = set(complete)
            pending = [(cell, job) for cell, job in jobs if job not in done]
            for job in complete:
                run_job(job)  # completes the record of a run that outlived the program that started it
            print_out(f"{len(jobs)} runs, {len(complete)} of them complete: {self.folder}")
            options = {(cell.task, cell.agent): json.loads(job.options) for cell, job in pending}
            warn_about_environments(self.file, plan, options)
            report = _Progress(len(pending))
            with self._executor() as executor:
                run_jobs([job for _, job in pending], executor, report)
            summary = Summary(read_results(plan, jobs, report.errors))
            for table in summary.tables:
                print_out(table)
            for failed in summary.results.failures:
                print_out(f"failed: {failed.cell.name}: {failed.failure}")
            for path in write_summary(summary, self.folder):
                print_out(f"written: {path}")
        if failures := len(summary.results.failures):
            exit_with(f"{failures} of {len(jobs)} runs failed; the same command tries them again", 2)

    def _executor(self) -> "AbstractContextManager[Executor]":
        from rlxf.experiments.execution import cluster_executor, local_executor

        if self.scheduler is not None:
            return cluster_executor(self.scheduler)
        return local_executor(self.processes)


class _Progress:
    """Function that prints a line for each run that ends.

    Args:
        total: number of runs.

    Attributes:
        errors: reasons of the runs that have failed.
    """

    def __init__(self, total: int):
        self.total = total
        self.ended = 0
        self.errors: dict[Job, str] = {}

    def __call__(self, job: "Job", outcome: "Outcome | BaseException") -> None:
        from rlxf.cli.output import print_out

        self.ended += 1
        if reason := _failure(job, outcome):
            self.errors[job] = reason
            text = f"failed: {reason}"
        else:
            text = f"complete after {outcome.seconds:.0f} s"  # type: ignore[union-attr]  # no exception
        print_out(f"{self.ended} of {self.total}: {job.folder}: {text}")


def _failure(job: "Job", outcome: "Outcome | BaseException") -> str:
    """Return the reason why a run has no result; "" if it has one."""
    from rlxf.experiments.jobs import is_complete

    if isinstance(outcome, BaseException):
        return str(outcome) or type(outcome).__name__
    if outcome.failure or is_complete(job):
        return outcome.failure
    return "its worker has finished it, but not in this folder: workers need the folder at the same path"
