"""Periodic checkpoints of a run, written in the background."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any, Protocol, runtime_checkable

from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from torch import Tensor

from rlxf.training.archive import Archive, read_archive, write_archive
from rlxf.training.compat import checkpoint_errors
from rlxf.training.distributed import process_group
from rlxf.utils.checks import as_whole_number
from rlxf.utils.errors import CheckpointError
from rlxf.utils.files import make_folder, sync_folder
from rlxf.utils.run_files import checkpoint_files, checkpoint_name
from rlxf.utils.signals import StopRequest
from rlxf.utils.warnings import warn_user

EXIT_RESUMABLE = 75
"""Exit status of an interrupted run that can be resumed: EX_TEMPFAIL of sysexits.h."""
STATEFUL_DOCUMENT = "stateful"
"""Name of the document with the states of objects that are passed to `CheckpointWriter`."""
CALLBACKS_DOCUMENT = "callbacks"
"""Name of the document with the states of the callbacks of the training."""
EVERY_SECONDS = 60.0
"""Default number of seconds between two checkpoints."""
KEEP = 3
"""Default number of checkpoints that are kept."""


@dataclass(frozen=True, init=False)
class CheckpointFolder:
    """Folder of checkpoints that are named by their number of steps: ``step-000000012000.zip``.

    Args:
        path: the folder; it is created when the first checkpoint is written.
        keep: number of checkpoints that are kept; the oldest are removed.

    Raises:
        TypeError: if keep is not a number.
        ValueError: if keep is less than 1 or has a fraction.
    """

    path: Path
    keep: int

    def __init__(self, path: str | os.PathLike[str], keep: int = KEEP):
        object.__setattr__(self, "path", Path(path))
        object.__setattr__(self, "keep", as_whole_number("keep", keep))

    def __fspath__(self) -> str:
        """Return the path of the folder, which ``learn(steps, resume_from=folder)`` accepts."""
        return str(self.path)

    def file(self, step: int) -> Path:
        """Return the path of the checkpoint after ``step`` steps; it need not exist."""
        return self.path / checkpoint_name(step)

    def files(self) -> list[Path]:
        """Return the paths of all checkpoints, the oldest first."""
        return checkpoint_files(self.path)

    def write(self, step: int, archive: Archive) -> None:
        """Write a checkpoint, then remove those that were written first until ``keep`` are left.

        The new one is kept even if the folder has others with more steps, e.g. of an earlier training, or
        damaged ones.

        Raises:
            OSError: if the checkpoint cannot be written, e.g. because the disk is full; others are unchanged.
        """
        if not self.path.is_dir():
            make_folder(self.path, exist_ok=True)
            sync_folder(self.path.parent)
        write_archive(self.file(step), archive.documents, archive.tensors)
        others = sorted((file for file in self.files() if file != self.file(step)), key=_modified)
        for file in others[: max(0, len(others) - self.keep + 1)]:
            file.unlink(missing_ok=True)

    def newest(self) -> Path:
        """Return the path of the newest valid checkpoint; warn about newer ones that are damaged.

        Raises:
            FileNotFoundError: if there is no valid checkpoint.
        """
        for file in reversed(self.files()):
            try:
                read_archive(file)
            except CheckpointError as error:
                warn_user(f"{error}; the previous checkpoint is used")
            else:
                return file
        raise FileNotFoundError(f"there is no valid checkpoint in {self.path}")


def _modified(file: Path) -> tuple[int, str]:
    """Return the time of the last change of a file, and its name, which orders files of the same time."""
    try:
        return file.stat().st_mtime_ns, file.name
    except FileNotFoundError:  # removed by another process
        return 0, file.name


class CheckpointableAgent(Protocol):
    """Interface of an agent that can be saved during training."""

    num_timesteps: int
    _n_updates: int
    has_resumable_training: bool
    """True if the present training has moments from which it can be resumed."""
    resumable: bool
    """True if training can be resumed bit-exactly from `snapshot` at this moment."""

    def snapshot(self) -> Archive:
        """Return the content of a checkpoint, as a copy that later steps do not change."""


@runtime_checkable
class Stateful(Protocol):
    """Interface of objects whose state is part of a checkpoint, such as an `EvaluationCallback`."""

    def state(self) -> Any:
        """Return the state as JSON."""

    def load_state(self, state: Any) -> None:
        """Restore the result of `state`."""


def stateful_callbacks(callback: BaseCallback) -> dict[str, Stateful]:
    """Return the callbacks with a state in a callback or a ``CallbackList``, by class name.

    Further callbacks of the same class have a number, such as "EvaluationCallback 2".
    """
    named: dict[str, Stateful] = {}
    counts: Counter[str] = Counter()
    for each in flat_callbacks(callback):
        if isinstance(each, Stateful):
            name = type(each).__name__
            counts[name] += 1
            named[name if counts[name] == 1 else f"{name} {counts[name]}"] = each
    return named


def flat_callbacks(callback: BaseCallback) -> Iterator[BaseCallback]:
    """Yield a callback, or those in a ``CallbackList`` and in its lists."""
    if not isinstance(callback, CallbackList):
        yield callback
        return
    for each in callback.callbacks:
        yield from flat_callbacks(each)


def load_callback_states(callback: BaseCallback, archive: Archive) -> None:
    """Load the states that a `CheckpointWriter` saved with a training; call it after its start.

    Callbacks without a state in the file, as those that the earlier training did not have, are unchanged.

    Args:
        callback: callback or ``CallbackList`` of the resumed training.
        archive: content of the file.

    Raises:
        CheckpointError: if a state is invalid.
    """
    with checkpoint_errors():
        states = archive.documents.get(CALLBACKS_DOCUMENT, {})
        for name, each in stateful_callbacks(callback).items():
            if name in states:
                each.load_state(states[name])


class BackgroundWriter:
    """Background thread that runs one function at a time; its errors are raised at the next call."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """True while the last function runs."""
        return self._pending is not None and not self._pending.done()

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the previous function, raise its error if it failed, then start ``work``."""
        self.wait()
        self._pending = self._pool.submit(work)

    def wait(self) -> None:
        """Wait for the current function; raise its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


class CheckpointWriter(BaseCallback):
    """Callback that saves the agent periodically during training, and at the end of `learn`.

    A training of `GTrXLPPO` can be resumed between two rollouts. If another callback stops it within a
    rollout, the newest file is one of an earlier moment, and a warning follows if it lacks updates.

    The callback copies the state of the agent and writes it in a background thread while training continues.
    A period in seconds keeps the relative cost independent of the duration of a step. The times of the
    checkpoints do not change the results of training.

    The states of the other callbacks of the training, such as the best return of an `EvaluationCallback`, are
    saved with the agent, and ``learn`` with ``resume_from`` loads them. These are the callbacks with methods
    ``state`` and ``load_state``, as those of rlxf. Pass this callback as the last one of the list, so that
    it saves a step after the others have seen it.

    In distributed training, each process needs this callback. All processes save at the same moment, by the
    clock of rank 0. Rank 0 writes the states of all processes into one file. A signal to any process stops
    all of them.

    Args:
        folder: folder of the checkpoints, or its path; a path alone keeps the newest three.
        every_seconds: time between checkpoints, in seconds.
        stateful: further objects whose state is saved with the agent, by name. Their states are in the
            document "stateful" of the file, for their ``load_state``, which ``learn`` does not call.
        stop: stop request. Once it is set, the callback saves the agent at the next moment from which
            training can be resumed, and stops training. Training that cannot be resumed, such as
            distillation, stops without a checkpoint. None: no stop request is possible.
        save_before: function of a number of steps that returns whether work that a stop request interrupts,
            e.g. an evaluation, is due by then. The agent is then saved at the last moment before this work
            from which training can be resumed, so that the work can be repeated. None: there is no such work.

    Attributes:
        stopped: whether the callback stopped training, after it saved the agent if training can be resumed.

    Warns:
        UserWarning: at the start of training, if it cannot be resumed, or if the folder has checkpoints with
            more steps; at its end, if updates are not saved.

    Raises:
        ValueError: if every_seconds is less than 0.
        OSError: during training, if a checkpoint cannot be written; earlier checkpoints are unchanged.
    """

    model: CheckpointableAgent  # type: ignore[assignment]

    def __init__(
        self,
        folder: CheckpointFolder | str | os.PathLike[str],
        every_seconds: float = EVERY_SECONDS,
        stateful: Mapping[str, Stateful] | None = None,
        stop: StopRequest | None = None,
        save_before: Callable[[int], bool] | None = None,
    ):
        super().__init__()
        if not every_seconds >= 0:
            raise ValueError(f"every_seconds must be at least 0, got {every_seconds}")
        self.folder = folder if isinstance(folder, CheckpointFolder) else CheckpointFolder(folder)
        self.every_seconds = every_seconds
        self.stateful = dict(stateful or {})
        self.stop = stop or StopRequest()
        self.stopped = False
        self.save_before = save_before or (lambda step: False)
        self.ranks = process_group()
        self._writer = BackgroundWriter()

    def _on_training_start(self) -> None:
        self._last, self._saved = time.monotonic(), self._progress()
        self._moment = self.model.num_timesteps
        if not self.model.has_resumable_training:
            warn_user("this training cannot be resumed, so no checkpoint is written; save the agent after it")
        elif (later := self.folder.files()[-1:]) and later[0] > self.folder.file(self._moment):
            warn_user(
                f"{self.folder.path} has checkpoints of an earlier training with more steps, up to "
                f"{later[0].name}, from which resume_from would continue; use a new folder, or remove them"
            )

    def _on_rollout_start(self) -> None:
        self._save_if_due()

    def _on_step(self) -> bool:
        self._save_if_due()
        return not self.stopped

    def _on_training_end(self) -> None:
        if self.model.resumable and self._progress() != self._saved:
            self.save()
        elif self.model.has_resumable_training and self.model._n_updates != self._saved[1]:
            warn_user(
                f"a callback stopped the training within a rollout, from which it cannot be resumed, so the "
                f"checkpoints in {self.folder.path} lack the updates since step {self._saved[0]:,}: save the "
                f"trained weights with agent.save(path)"
            )
        self._writer.wait()

    def _save_if_due(self) -> None:
        saves, never_saves = self.model.resumable, not self.model.has_resumable_training
        if self.stopped or not (saves or never_saves):
            return
        number, due = self._synchronize()
        if saves and (number or due):
            self.save()
        if number:
            self.stop.signal = Signals(number)  # another process may have received it
            self._writer.wait()
            self.stopped = True

    def _synchronize(self) -> tuple[int, bool]:
        """Return the signal that any process received (0: none), and whether a checkpoint is due."""
        own = self.stop.signal or 0
        ahead = self._next_moment()
        due = time.monotonic() - self._last >= self.every_seconds and not self._writer.busy
        due = self.ranks.is_main and (due or self.save_before(ahead))
        agreed = self.ranks.all_reduce_max(2 * own + due)
        return agreed // 2, agreed % 2 == 1

    def _next_moment(self) -> int:
        """Return the expected number of steps at the next moment from which training can be resumed."""
        before, self._moment = self._moment, self.model.num_timesteps
        return 2 * self._moment - before

    def close(self) -> None:
        """Wait until the last checkpoint is written."""
        self._writer.wait()

    def save(self) -> None:
        """Save a checkpoint now."""
        step = self.model.num_timesteps
        archive = self.model.snapshot()
        archive.documents[STATEFUL_DOCUMENT] = _states(self.stateful)
        archive.documents[CALLBACKS_DOCUMENT] = _states(stateful_callbacks(self.locals.get("callback", self)))
        if self.ranks.is_main:
            self._writer.start(lambda: self.folder.write(step, archive))
        self._last, self._saved = time.monotonic(), self._progress()

    def _progress(self) -> tuple[int, int]:
        """Return the numbers of steps and updates so far; updates may follow the last step."""
        return self.model.num_timesteps, self.model._n_updates


def _states(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return copies of the states, which may contain lists that later steps change."""
    return {name: deepcopy(each.state()) for name, each in objects.items()}


def clone_tensors(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return detached copies of groups of tensors on the CPU.

    A thread that writes them must not copy from a GPU, where another thread may capture a CUDA graph.
    """
    return {
        group: {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        for group, named in tensors.items()
    }
