"""Execution of a sweep: one trial after the other in each thread, with pruning and resumption."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, Any

import numpy as np

from rlxf.experiments.curves import describe_metrics, find_curve, find_points, metrics_of
from rlxf.experiments.execution import locked, run_job, stop_all
from rlxf.experiments.jobs import ExperimentError, Job
from rlxf.experiments.results import read_returns
from rlxf.experiments.study import REASON, SweepStudy, storage_errors
from rlxf.experiments.sweep_plan import SweepPlan
from rlxf.training.strict_json import load_json_file
from rlxf.utils.files import make_folder
from rlxf.utils.run_files import CONFIG, EVALUATION, MEAN_RETURN

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

POINTS = 20
"""Parts of a training. At the end of each but the last, the learning curve decides about pruning."""
STOPPED = {75, 130, 143, -SIGTERM, -SIGINT}
"""Exit statuses of a training that was stopped by a signal."""
FULL_DISK = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""Messages of a training without space on the disk, which would end all later trials, too."""
GRACE_SECONDS = 3.0
"""Time in which this process receives the signal that has ended a training, if it was sent to both."""


class MissingMetricError(ValueError):
    """Raised when a run that has ended has no value of the metric of the sweep."""


class InterruptedTrialError(Exception):
    """Raised when a trial was stopped, because the sweep ends. The trial is continued later."""


@dataclass(frozen=True)
class TrialEnd:
    """End of a trial.

    Args:
        number: number of the trial.
        state: "complete", "pruned" or "failed".
        value: objective; None if there is none.
        reason: reason of a failure.
        options: values of the searched options.
        seconds: wall-clock time.
    """

    number: int
    state: str
    value: float | None
    reason: str
    options: Mapping[str, Any]
    seconds: float


class LearningCurve:
    """Function that reports the learning curve of a run to Optuna, and returns whether the trial is pruned.

    The curve is interpolated at fixed parts of the training, so that trials whose evaluations have other
    steps can be compared. Of several values at one step, the first one counts, because the evaluation after
    the training is logged later than the last one during it. So the decision depends on the curve only, and
    not on the time of the calls.

    Args:
        trial: the trial.
        folder: folder of the run.
        plan: the sweep.
        index: position of the run among the runs of the trial.
        study: the study of the trial.
    """

    def __init__(self, trial: "Trial", folder: Path, plan: SweepPlan, index: int, study: SweepStudy):
        self.trial = trial
        self.folder = folder
        self.plan = plan
        self.place = study.place
        self.first = index * POINTS
        known = study.frozen(trial.number).intermediate_values
        own = [step - self.first for step in known if 0 < step - self.first < POINTS]
        self.reported = max(own, default=0)
        self.pruned = False

    def __call__(self) -> bool:
        """Report new values, and return whether the trial is pruned."""
        if self.pruned or self.plan.pruning is None:
            return self.pruned
        try:
            values = self._values()
        except (OSError, ValueError, KeyError, TypeError):  # a file that is being written
            return False
        for point in range(self.reported + 1, POINTS):
            if not np.isfinite(values[point]):
                continue
            self.reported = point
            with storage_errors(self.place):
                self.trial.report(float(values[point]), self.first + point)
                self.pruned = point >= self.plan.pruning.warmup * POINTS and self.trial.should_prune()
            if self.pruned:
                break
        return self.pruned

    def _values(self) -> Any:
        """Return the metric after each part of the training, from 0 to `POINTS`; NaN if it is unknown."""
        config = load_json_file(self.folder / CONFIG)
        total = config.get("total_timesteps") or config["updates"]
        steps, values = find_points(self.folder, self.plan.metric)
        grid = np.arange(POINTS + 1) * (total / POINTS)
        if not len(steps):
            return np.full(POINTS + 1, np.nan)
        steps, first = np.unique(steps, return_index=True)
        return np.interp(grid, steps, values[first], left=np.nan, right=np.nan)


class TrialRunner:
    """Training of the trials of a study on this machine.

    Args:
        plan: the sweep.
        study: its study.
        folder: folder of the runs, which exists. Runs are trial-NUMBER/seed-SEED.
        make_job: function of the folder of a run, the options of a trial and a seed; it returns the run, and
            raises ValueError if the command refuses the options.
        on_end: function that is called after each trial.
    """

    def __init__(
        self,
        plan: SweepPlan,
        study: SweepStudy,
        folder: Path,
        make_job: Callable[[Path, dict[str, Any], int], Job],
        on_end: Callable[[TrialEnd], object],
    ):
        self.plan = plan
        self.study = study
        self.folder = folder
        self.make_job, self.on_end = make_job, on_end
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self, processes: int) -> None:
        """Train until the study has as many trials as planned, ``processes`` of them at a time.

        An exception, e.g. KeyboardInterrupt, stops the runs, which save their progress.

        Raises:
            StorageError: if the storage cannot be used.
            OSError: if a file cannot be written.
            ExperimentError: if a run lacks the metric, and no trial has it.
        """
        with ThreadPoolExecutor(processes) as executor:
            workers = [executor.submit(self._work) for _ in range(processes)]
            try:
                for worker in as_completed(workers):
                    worker.result()
            except BaseException:
                self._stopped.set()
                stop_all(workers)
                raise

    def _work(self) -> None:
        while not self._stopped.is_set():
            with self._claimed() as trial:
                if trial is None:
                    return
                try:
                    end = self._run_trial(trial)
                except InterruptedTrialError:
                    return
                with self._lock:
                    self.on_end(end)

    @contextmanager
    def _claimed(self) -> "Iterator[Trial | None]":
        """Yield a trial that no other process works on: an interrupted one, or a new one; None at the end.

        The options that are missing are suggested, also those of a trial that was interrupted before.
        """
        with ExitStack() as stack:
            with self._lock, locked(self.folder / ".sweep.lock"), storage_errors(self.study.place):
                trials = self.study.trials()
                trial = self._interrupted(trials, stack)
                if trial is None and len(trials) < self.plan.trials:
                    trial = self.study.study.ask()
                    stack.enter_context(locked(self._lock_file(trial.number)))
                if trial is not None:
                    self.plan.space.suggest(trial, self.plan.fixed)
            yield trial

    def _interrupted(self, trials: "list[FrozenTrial]", stack: ExitStack) -> "Trial | None":
        """Return a trial whose process has ended, and enter its lock; None if there is none."""
        for each in trials:
            here = self.study.private or self._path(each.number).is_dir()
            if each.state.name != "RUNNING" or not here:
                continue
            held = ExitStack()
            try:
                held.enter_context(locked(self._lock_file(each.number), blocking=False))
            except BlockingIOError:
                continue
            trial = self.study.trial(each.number)
            if self.study.frozen(each.number).state.name == "RUNNING":
                stack.enter_context(held)
                return trial
            held.close()
        return None

    def _path(self, number: int) -> Path:
        return self.folder / f"trial-{number:04}"

    def _lock_file(self, number: int) -> Path:
        """Return the file that the process of a trial locks, after its folder was created."""
        make_folder(self._path(number), exist_ok=True)
        return self._path(number) / ".lock"

    def _run_trial(self, trial: "Trial") -> TrialEnd:
        """Train the runs of a trial, and store its end.

        Raises:
            ExperimentError: if the runs lack the metric, and no trial has it: it may be misspelled.
        """
        start = time.monotonic()
        searched: dict[str, Any] = {}
        value = None
        reason = ""
        is_missing = False
        try:
            searched = self.plan.space.restore(trial.params, self.plan.fixed)
            value = self._mean_objective(trial, searched)
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            is_missing = isinstance(error, MissingMetricError)
        state = "failed" if reason else "pruned" if value is None else "complete"
        with storage_errors(self.study.place):
            self._tell(trial, state, value, reason)
            is_unknown = is_missing and not self._has_values()
        if is_unknown:
            raise ExperimentError(
                f"{reason}: correct the metric in {self.plan.path}, and choose another folder with --output; "
                f"or repeat the command, if other options give the metric"
            )
        return TrialEnd(trial.number, state, value, reason, searched, time.monotonic() - start)

    def _has_values(self) -> bool:
        """Return whether a trial has a value of the metric, also of a part of its training."""
        trials = self.study.trials()
        return any(trial.value is not None or trial.intermediate_values for trial in trials)

    def _mean_objective(self, trial: "Trial", searched: Mapping[str, Any]) -> float | None:
        """Train a run for each seed, and return the mean objective; None once a run is pruned."""
        values = []
        for index in range(len(self.plan.seeds)):
            value = self._train(trial, searched, index)
            if value is None:
                return None
            values.append(value)
        return float(np.mean(values))

    def _tell(self, trial: "Trial", state: str, value: float | None, reason: str) -> None:
        from optuna.trial import TrialState

        if reason:
            trial.set_user_attr(REASON, reason)
        states = {"failed": TrialState.FAIL, "pruned": TrialState.PRUNED, "complete": TrialState.COMPLETE}
        self.study.study.tell(trial, value, state=states[state])

    def _train(self, trial: "Trial", searched: Mapping[str, Any], index: int) -> float | None:
        """Train one run of a trial, and return its objective; None if the trial is pruned.

        Raises:
            ValueError: if the run fails.
            OSError: if the disk is full. The trial is continued by the next call.
            InterruptedTrialError: if the sweep ends.
        """
        seed = self.plan.seeds[index]
        folder = self._path(trial.number) / f"seed-{seed}"
        with self._lock:
            job = self.make_job(folder, self.plan.options(searched), seed)
        curve = LearningCurve(trial, folder, self.plan, index, self.study)
        if self._stopped.is_set():
            raise InterruptedTrialError
        outcome = run_job(job, curve)
        if curve():
            return None
        if outcome.returncode in STOPPED and self._stopped.wait(GRACE_SECONDS):
            raise InterruptedTrialError
        if outcome.returncode:
            if any(reason in outcome.message for reason in FULL_DISK):
                raise OSError(
                    errno.ENOSPC, f"{folder}: {outcome.message}; the same command continues the trial"
                )
            raise ValueError(outcome.failure)
        return objective(folder, self.plan.metric)


def objective(folder: Path, metric: str) -> float:
    """Return the final value of a metric of a run: its last evaluation, or the last value in its logs.

    Raises:
        MissingMetricError: if there is none.
        ValueError: if it is not finite.
    """
    if metric == MEAN_RETURN:
        value = float(read_returns(folder / EVALUATION, "last")[0].mean())
    else:
        curve = find_curve(folder, metric)
        if curve is None:
            known = describe_metrics(metric, metrics_of(folder))
            raise MissingMetricError(f"the run has no metric {metric}{known}")
        value = curve.last()
    if not isfinite(value):
        raise ValueError(f"{metric} is {value}")
    return value
