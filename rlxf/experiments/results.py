"""Returns of the runs of an experiment, by task and agent, as tables of seeds and episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlxf.experiments.columns import LARGEST_VALUE
from rlxf.experiments.jobs import ExperimentError, Job, Outcome, is_complete
from rlxf.experiments.plan import Cell, Plan, Task
from rlxf.training.completion import Completion
from rlxf.training.strict_json import load_json_file
from rlxf.utils.run_files import EVALUATION


@dataclass(frozen=True)
class RunResult:
    """Result of one run.

    Args:
        cell: the run.
        returns: float64 (n,), return of each evaluation episode; None if the run is not complete.
        outcome: outcome of the last attempt; None before the first.
        checkpoint: evaluated checkpoint, "last" or "best".
        completion: completion marker of the run; None if the run is not complete.
        error: reason why the call that should train the run failed; "" if it did not.
    """

    cell: Cell
    returns: NDArray[np.float64] | None
    outcome: Outcome | None
    checkpoint: str = "last"
    completion: Completion | None = None
    error: str = ""

    @property
    def ended_early(self) -> bool:
        """True if the training ended before its last step, because an evaluation reached ``stop_return``."""
        return self.completion is not None and self.completion.ended_early

    @property
    def failure(self) -> str:
        """Reason why the run is not complete after its last attempt; "" if there was none."""
        if self.returns is not None:
            return ""
        return self.error or ("" if self.outcome is None else self.outcome.failure)


@dataclass(frozen=True)
class Results:
    """Results of all runs of an experiment.

    Args:
        plan: the experiment.
        runs: result of each run, in the order of `Plan.cells`.
    """

    plan: Plan
    runs: tuple[RunResult, ...]

    def returns(self, task: str, agent: str) -> NDArray[np.float64] | None:
        """Return the returns (S, E) of the complete runs of an agent on a task; None if there are none.

        Raises:
            ExperimentError: if runs have different numbers of evaluation episodes. The first episodes of a
                run are not a random sample of all, because they are in the order in which they ended.
        """
        found = [run.returns for run in self.of(task, agent) if run.returns is not None]
        if len(episodes := sorted({len(returns) for returns in found})) > 1:
            raise ExperimentError(
                f"the runs of {agent} on {task} have {', '.join(map(str, episodes))} evaluation episodes; "
                f"remove the folders of those with another number than the file asks for, to repeat them"
            )
        return np.stack(found) if found else None

    def label(self, agent: str, tasks: Sequence[str]) -> str:
        """Return the name of an agent, with the checkpoint unless it is that of the experiment."""
        runs = [run for task in tasks for run in self.of(task, agent) if run.returns is not None]
        others = [run.checkpoint for run in runs if run.checkpoint != self.plan.checkpoint]
        if not others:
            return agent
        part = "" if len(others) == len(runs) else f" of {len(others)} of {len(runs)} runs"
        return f"{agent} ({others[0]} checkpoint{part})"

    def scores(self, task: Task, agent: str) -> NDArray[np.float64] | None:
        """Return the normalized scores (S, E) of an agent on a task with a `Task.score_range`."""
        returns = self.returns(task.name, agent)
        if returns is None or task.score_range is None:
            return None
        low, high = task.score_range
        return (returns - low) / (high - low)

    def of(self, task: str, agent: str) -> list[RunResult]:
        """Return the results of all seeds of an agent on a task."""
        return [run for run in self.runs if (run.cell.task, run.cell.agent) == (task, agent)]

    @property
    def failures(self) -> list[RunResult]:
        """Runs whose last attempt failed."""
        return [run for run in self.runs if run.failure]


def read_results(plan: Plan, jobs: Sequence[tuple[Cell, Job]], errors: Mapping[Job, str]) -> Results:
    """Read the results of the runs of an experiment.

    Args:
        plan: the experiment.
        jobs: its runs.
        errors: reasons of the runs whose calls failed.

    Raises:
        ExperimentError: if a file is damaged.
    """
    return Results(plan, tuple(_read_run(cell, job, plan.checkpoint, errors) for cell, job in jobs))


def _read_run(cell: Cell, job: Job, checkpoint: str, errors: Mapping[Job, str]) -> RunResult:
    if not is_complete(job):
        return RunResult(cell, None, Outcome.read(job), error=errors.get(job, ""))
    folder = Path(job.folder)
    returns, used = read_returns(folder / EVALUATION, checkpoint)
    return RunResult(cell, returns, Outcome.read(job), used, Completion.read(folder))


def read_returns(file: Path, checkpoint: str) -> tuple[NDArray[np.float64], str]:
    """Read the returns (n,) of a checkpoint in the final evaluation of a run, and the name of the checkpoint.

    An agent that is conditioned on several target returns has those of the first target. A run without a best
    checkpoint, such as one of a baseline, has those of the last one.

    Raises:
        ExperimentError: if the file is missing or damaged.
    """
    try:
        document = load_json_file(file)
        used = checkpoint if checkpoint in document else "last"
        report: dict[str, Any] = document[used]
        report = report["targets"][0] if "targets" in report else report
        returns = np.array(report["returns"], np.float64)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ExperimentError(
            f"{file} cannot be read ({error}): remove the folder of the run to repeat it"
        ) from error
    if returns.ndim != 1 or not len(returns) or not (np.abs(returns) <= LARGEST_VALUE).all():
        raise ExperimentError(
            f"{file} must have returns of at most {LARGEST_VALUE:g} in size: remove the folder of the run to "
            f"repeat it"
        )
    return returns, used
