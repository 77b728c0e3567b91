"""Logs of trainings as columns of numbers: ``progress.csv``, ``*monitor.csv`` and ``evaluations.npz``.

The files may be untrusted. They are read as data: no pickle, at most
`rlxf.experiments.columns.MAX_BYTES` of a file, and any damage is a `ValueError` of one sentence with the file
and the line.
"""

import lzma
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rlxf.experiments.columns import (
    LARGEST_STEP,
    LARGEST_VALUE,
    Points,
    header_of,
    listed,
    read_arrays,
    read_columns,
    trailing_mean,
    without_gaps,
)
from rlxf.training.strict_json import load_json
from rlxf.utils.files import read_bounded
from rlxf.utils.run_files import MEAN_RETURN, PROGRESS
from rlxf.utils.warnings import warn_user

STEP_COLUMNS = ("time/total_timesteps", "total_timesteps", "timesteps", "steps", "step")
"""Names of the column of steps, by priority."""
MONITOR, EVALUATIONS = "monitor.csv", "evaluations.npz"
EPISODE_WINDOW = 100
"""Number of episodes in the mean of ``rollout/ep_rew_mean`` of Stable-Baselines3."""


class Log(ABC):
    """Log of one training.

    Args:
        files: the files, at least one.
    """

    def __init__(self, *files: Path):
        self.files = files

    @property
    def path(self) -> Path:
        """The first file."""
        return self.files[0]

    @property
    def task(self) -> str:
        """Environment id in the log; "" if it names none."""
        return ""

    @property
    def unit(self) -> str:
        """Unit of the steps."""
        return "environment steps"

    @abstractmethod
    def metrics(self) -> list[str]:
        """Return the names of the metrics; [] if nothing was logged yet.

        Raises:
            ValueError: if a file is too large or damaged.
            OSError: if a file cannot be read.
        """

    @abstractmethod
    def points(self, metric: str) -> Points:
        """Return the points of one of the `metrics`. Values that are NaN or infinite are left out.

        Raises:
            ValueError: if a file is too large or damaged.
            OSError: if a file cannot be read.

        Warns:
            UserWarning: if a value is NaN or infinite, steps occur twice in a CSV file, or files of
                ``Monitor`` seem to be of several trainings.
        """


class TableLog(Log):
    """CSV file with a column of steps, as SB3's logger writes it.

    An empty field is a value that was not logged at this step. The last line of a ``progress.csv`` is left
    out if it does not end in a newline, because a training is writing it.
    """

    @property
    def unit(self) -> str:
        """Unit of the steps; that of other files than SB3's is unknown."""
        return super().unit if self.path.name == PROGRESS else "steps"

    def metrics(self) -> list[str]:
        """Return the columns other than that of steps."""
        names = header_of(self.path, self._data())
        return [name for name in names if name and name != self._step_column(names)]

    def points(self, metric: str) -> Points:
        """Return the rows with a value of the metric."""
        data = self._data()
        step = self._step_column(header_of(self.path, data))
        lines, table = read_columns(self.path, data, 1, (step, metric), optional=metric)
        wrong = ~((table[:, 0] >= 0) & (table[:, 0] <= LARGEST_STEP))
        if wrong.any():
            line, value = lines[wrong][0], table[wrong, 0][0]
            raise ValueError(f"{self.path} line {line}: {step} must be from 0 to 1e18, got {value:g}")
        if self.path.name != PROGRESS:
            self._warn_of_repeated_steps(lines, table[:, 0])
        return without_gaps(self.path, metric, lines, table[:, 0], table[:, 1])

    def _warn_of_repeated_steps(self, lines: NDArray[np.int64], steps: NDArray[np.float64]) -> None:
        order = np.argsort(steps, kind="stable")
        repeats = np.diff(steps[order]) == 0
        repeated, earlier = order[1:][repeats], order[:-1][repeats]
        if repeated.size > 1 or (repeated - earlier > 1).any():  # two evaluations at the end are usual
            first = repeated.min()
            warn_user(
                f"{self.path} line {lines[first]}: the step {steps[first]:g} occurs again, and its last "
                f"value counts; if the file has several trainings, write one file for each"
            )

    def _data(self) -> bytes:
        data = read_bounded(self.path)
        return data[: data.rfind(b"\n") + 1] if self.path.name == PROGRESS else data

    def _step_column(self, names: Sequence[str]) -> str:
        found = [name for name in STEP_COLUMNS if name in names]
        if names and not found:
            raise ValueError(
                f"{self.path} has no column of steps ({', '.join(STEP_COLUMNS)}); its columns are "
                f"{listed(names)}"
            )
        return found[0] if found else ""


class MonitorLog(Log):
    """Files of SB3's ``Monitor``, one for each parallel environment of a training.

    The episodes of all files are sorted by their time of day, and the steps are the cumulative sum of their
    lengths, as in the plots of SB3. A file that a resumed training has extended, whose times begin again at
    0, keeps its order. If files do not overlap in time, or some are named ``eval*``, a warning says that they
    may be of several trainings. The metrics are ``r`` and ``l``, the return and the
    length of each episode, and their means over the last 100 episodes under the names of SB3's logger,
    ``rollout/ep_rew_mean`` and ``rollout/ep_len_mean``.
    """

    COLUMNS = ("r", "l", "t")
    MEANS: ClassVar = {"rollout/ep_rew_mean": "r", "rollout/ep_len_mean": "l"}

    def metrics(self) -> list[str]:
        """Return the metrics; [] if no episode ended yet."""
        return [*self.MEANS, "r", "l"] if len(self._episodes()[1]) else []

    def points(self, metric: str) -> Points:
        """Return one point for each episode."""
        lines, episodes, files = self._episodes()
        self._warn_of_several_trainings(episodes[:, 2], files)
        values = episodes[:, self.COLUMNS.index(self.MEANS.get(metric, metric))]
        path = self.files[files[np.argmin(np.abs(values) <= LARGEST_VALUE)]]  # of the first one left out
        points = without_gaps(path, metric, lines, np.cumsum(episodes[:, 1]), values)
        return (points[0], trailing_mean(points[1], EPISODE_WINDOW)) if metric in self.MEANS else points

    def _warn_of_several_trainings(self, times: NDArray[np.float64], files: NDArray[np.int64]) -> None:
        """Warn if some files seem to be of evaluations, or of trainings one after the other."""
        names = [path.name for path in self.files if path.name.lower().startswith("eval")]
        reason = ""
        if 0 < len(names) < len(self.files):
            reason = f"{listed(names, 3)} may be of evaluations"
        elif len(self.files) > 1 and not self._overlap(times, files):
            reason = "some end before others begin"
        if reason:
            warn_user(
                f"{self.path.parent} has {len(self.files)} files of Monitor, which count as the parallel "
                f"environments of one training, but {reason}; if they are of several trainings, give the "
                f"path of each file, or move them to folders of their own"
            )

    def _overlap(self, times: NDArray[np.float64], files: NDArray[np.int64]) -> bool:
        """Return whether all files with an episode, from their start to their last episode, overlap."""
        used = np.unique(files)
        paths = [self.files[file] for file in used]
        starts = [self._start(path, read_bounded(path)) for path in paths]
        ends = [times[files == file].max() for file in used]
        return max(starts, default=0.0) <= min(ends, default=0.0)

    @property
    def task(self) -> str:
        """``env_id`` in the first line of the first file."""
        task = self._monitor_header(self.path, read_bounded(self.path)).get("env_id")
        return task if isinstance(task, str) and task != "None" else ""

    def _episodes(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Return line numbers (n,), `COLUMNS` (n, 3) and indices of files (n,) of all episodes.

        They are sorted by time of day.
        """
        each = [self._episodes_of(path) for path in self.files]
        lines, episodes = (np.concatenate(parts) for parts in zip(*each, strict=True))
        files = np.repeat(np.arange(len(each)), [len(numbers) for numbers, _ in each])
        order = np.argsort(episodes[:, 2], kind="stable")
        return lines[order], episodes[order], files[order]

    def _episodes_of(self, path: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        data = read_bounded(path)
        data = data[: data.rfind(b"\n") + 1]
        start = self._start(path, data)
        table = data.partition(b"\n")[2]
        lines, episodes = read_columns(path, table, 2, self.COLUMNS)
        valid = (episodes[:, 1] >= 0) & (episodes[:, 1] <= LARGEST_STEP) & np.isfinite(episodes[:, 2])
        if not valid.all():
            raise ValueError(f"{path} line {lines[~valid][0]}: l must be from 0 to 1e18, and t finite")
        episodes[:, 2] = _continued(episodes[:, 2])
        episodes[:, 2] += start
        return lines, episodes

    def _start(self, path: Path, data: bytes) -> float:
        """Return the time of day at the start of a file; 0 if it is missing or broken."""
        start = self._monitor_header(path, data).get("t_start", 0.0)
        return float(start) if type(start) in (int, float) and abs(start) <= LARGEST_STEP else 0.0

    def _monitor_header(self, path: Path, data: bytes) -> dict[str, Any]:
        line = data.partition(b"\n")[0]
        try:
            header = load_json(line.removeprefix(b"#")) if line.startswith(b"#") else None
        except ValueError:
            header = None
        if not isinstance(header, dict):
            raise ValueError(f"{path} line 1 must be # and a JSON object, as Monitor writes it")
        return header


def _continued(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return times (n,) that do not decrease: later parts of a file begin at the end of the one before.

    A part begins where the time falls to less than half. A smaller decrease is a correction of the clock.
    """
    restarts = times[1:] < 0.5 * times[:-1]
    offsets = np.cumsum(np.where(restarts, times[:-1], 0.0))
    continued = times + np.concatenate([np.zeros(min(len(times), 1)), offsets])
    return np.maximum.accumulate(continued)


UNREADABLE = (
    *(ValueError, NotImplementedError, EOFError, RuntimeError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError),
)
"""Errors of NumPy and of the decompression for the bytes of a damaged NPZ file."""


class EvaluationsLog(Log):
    """``evaluations.npz`` of SB3's ``EvalCallback``."""

    NAMES: ClassVar = {
        MEAN_RETURN: "results",
        "eval/mean_ep_length": "ep_lengths",
        "eval/success_rate": "successes",
    }
    """Metric of SB3's logger -> array (n, episodes), whose mean over episodes it is."""

    def metrics(self) -> list[str]:
        """Return the metrics of which there are values at all steps."""
        arrays = self._arrays()
        return [metric for metric, name in self.NAMES.items() if name in arrays]

    def points(self, metric: str) -> Points:
        """Return one point for each evaluation."""
        arrays = self._arrays()
        values = arrays[self.NAMES[metric]].mean(axis=1)
        numbers = np.arange(1, len(values) + 1)
        return without_gaps(self.path, metric, numbers, arrays["timesteps"], values, "evaluation")

    def _arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return the arrays with as many rows as there are steps.

        Raises:
            ValueError: if the file is too large, is no NPZ file, or contains other arrays.
        """
        data = read_bounded(self.path)
        try:
            with zipfile.ZipFile(BytesIO(data)) as archive:
                arrays = read_arrays(archive, ("timesteps", *self.NAMES.values()))
        except UNREADABLE as error:
            raise ValueError(f"{self.path} is not an evaluations.npz of EvalCallback: {error}") from error
        steps = arrays.get("timesteps")
        if steps is None or steps.ndim != 1 or not ((steps >= 0) & (steps <= LARGEST_STEP)).all():
            raise ValueError(f"{self.path} must contain timesteps, a list of numbers from 0 to 1e18")
        return {
            name: values
            for name, values in arrays.items()
            if name == "timesteps" or (values.ndim == 2 and len(values) == len(steps) and values.size)
        }


def _is_log(path: Path) -> bool:
    """Return whether a path in a folder is a file; raise ValueError if it is a link to one.

    A link in the folder of a stranger may lead to a file elsewhere.
    """
    if path.is_symlink() and path.is_file():
        raise ValueError(
            f"{path} is a symbolic link, and links in a folder are not followed: give the path of its "
            f"target, or replace it by a copy"
        )
    return path.is_file()


def open_logs(path: Path) -> list[Log]:
    """Return the logs in a folder, or that of a file; [] if a folder has none.

    Of the logs in a folder that have a metric, the first one counts: ``progress.csv``, then
    ``evaluations.npz``, then the files of ``Monitor``.

    Raises:
        ValueError: if a file has another name than that of a log, or a log in a folder is a symbolic link.
    """
    if path.is_dir():
        monitors = sorted(file for file in path.glob(f"*{MONITOR}") if _is_log(file))
        logs = [
            TableLog(path / PROGRESS),
            EvaluationsLog(path / EVALUATIONS),
            *[MonitorLog(*monitors)] * bool(monitors),
        ]
        return [log for log in logs if _is_log(log.path)]
    if path.name.endswith(MONITOR):
        return [MonitorLog(path)]
    if path.suffix.lower() not in (".csv", ".npz"):
        raise ValueError(f"{path} is not a log: give a folder of runs, a .csv file or an {EVALUATIONS}")
    return [EvaluationsLog(path) if path.suffix.lower() == ".npz" else TableLog(path)]
