"""The last checkpoints of a run, written while it goes on."""

import re
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any, Protocol

from stable_baselines3.common.callbacks import BaseCallback
from torch import Tensor

from rlxf.training.archive import Archive, read_archive, write_archive
from rlxf.training.atomic import sync_folder
from rlxf.training.errors import CheckpointError
from rlxf.training.joining import here
from rlxf.training.stopping import Stop
from rlxf.utils.permissions import make_folder

NAME = re.compile(r"step-(\d{12})\.zip")
BESIDE = "beside"
EVERY_SECONDS = 60.0
KEPT = 3


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoints by the number of steps before them: ``step-000000012000.zip``.

    Args:
        path: the folder; it is made when the first one is written.
        keep: how many of them stay; the oldest go.

    Raises:
        ValueError: if keep is less than 1.
    """

    path: Path
    keep: int = KEPT

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))  # text will do
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")

    def file(self, step: int) -> Path:
        """Where the checkpoint after so many steps is, or would be."""
        return self.path / f"step-{step:012d}.zip"

    def files(self) -> list[Path]:
        """All of them, the oldest first."""
        if not self.path.is_dir():
            return []
        return sorted(file for file in self.path.iterdir() if NAME.fullmatch(file.name))

    def write(self, step: int, archive: Archive) -> None:
        """Write one, then drop the oldest beyond ``keep``.

        Raises:
            OSError: if it cannot be written, e.g. the disk is full; the others stay.
        """
        if not self.path.is_dir():
            make_folder(self.path, exist_ok=True)
            sync_folder(self.path.parent)
        write_archive(self.file(step), archive.documents, archive.tensors)
        for file in self.files()[: -self.keep]:
            file.unlink(missing_ok=True)

    def newest(self) -> Path:
        """The newest one that is whole; damaged ones before it are named in a warning.

        Raises:
            FileNotFoundError: if there is none.
        """
        for file in reversed(self.files()):
            try:
                read_archive(file)
            except CheckpointError as error:
                warnings.warn(f"{error}; the one before it is used", stacklevel=2)
            else:
                return file
        raise FileNotFoundError(f"there is no whole checkpoint in {self.path}")


class Saved(Protocol):
    """An agent that can be saved amid its training."""

    num_timesteps: int
    _n_updates: int
    at_rest: bool
    """Whether `snapshot` holds all that is needed to go on to the same bits."""

    def snapshot(self) -> Archive:
        """What ``save`` would write, and what comes later does not change it."""


class Stateful(Protocol):
    """What goes on with a training, such as an `EvaluationCallback`."""

    def state(self) -> Any:
        """What it needs to go on, as JSON."""

    def take_up(self, state: Any) -> None:
        """Go on behind what `state` gave."""


class InBackground:
    """Does one thing at a time in a thread of its own, and raises what went wrong at the next occasion."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the last thing is not done yet."""
        return self._pending is not None and not self._pending.done()

    def start(self, work: Callable[[], None]) -> None:
        """Begin, once what was begun before is done; raises what that raised."""
        self.wait()
        self._pending = self._pool.submit(work)

    def wait(self) -> None:
        """Until what was begun is done; raises what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


class Checkpoints(BaseCallback):
    """Saves the agent every so many seconds of its training, and once more at the end of `learn`.

    It takes a copy of what is to be saved, and writes it in a thread while the training goes on. A rate in
    seconds keeps the cost the same for any size of steps. When they are taken changes no bit of the training.

    Where several processes train together, each needs one. They save at the same moment, by the clock of the
    one of rank 0, which writes what all of them have into one file; a signal to any of them stops all.

    Args:
        folder: where they go.
        every_seconds: from one to the next.
        beside: what else goes on with the training, by name; the document "beside" of a file has the state
            of each, for its ``take_up``.
        stop: once it is asked for, the agent is saved at the next moment from which it can be resumed, and
            the training stops; None if nobody asks.

    Attributes:
        stopped: whether it stopped the training, after it saved the agent.

    Raises:
        ValueError: if every_seconds is less than 0.
        OSError: amid the training, if one could not be written; those before it stay.
    """

    model: Saved  # type: ignore[assignment]

    def __init__(
        self,
        folder: CheckpointFolder,
        every_seconds: float = EVERY_SECONDS,
        beside: Mapping[str, Stateful] | None = None,
        stop: Stop | None = None,
    ):
        super().__init__()
        if not every_seconds >= 0:
            raise ValueError(f"every_seconds must be at least 0, got {every_seconds}")
        self.folder, self.every_seconds = folder, every_seconds
        self.beside, self.stop, self.stopped = dict(beside or {}), stop or Stop(), False
        self.ranks = here()
        self._writer = InBackground()

    def _on_training_start(self) -> None:
        self._last, self._saved = time.monotonic(), self._progress()

    def _on_rollout_start(self) -> None:
        self._save_if_due()

    def _on_step(self) -> bool:
        self._save_if_due()
        return not self.stopped

    def _on_training_end(self) -> None:
        if self.model.at_rest and self._progress() != self._saved:
            self.save()
        self._writer.wait()

    def _save_if_due(self) -> None:
        if not self.model.at_rest or self.stopped:
            return
        signal, due = self._agreed()
        if signal:
            self.stop.by = Signals(signal)  # it may have been another process that got it
            self.save()
            self._writer.wait()
            self.stopped = True
        elif due:
            self.save()

    def _agreed(self) -> tuple[int, bool]:
        """The signal that one of the processes got, 0 for none, and whether it is time to save."""
        own = self.stop.by or 0
        due = self.ranks.writes and time.monotonic() - self._last >= self.every_seconds
        agreed = self.ranks.largest(2 * own + (due and not self._writer.busy))
        return agreed // 2, agreed % 2 == 1

    def save(self) -> None:
        """Save now."""
        step, archive = self.model.num_timesteps, self.model.snapshot()
        archive.documents[BESIDE] = {name: each.state() for name, each in self.beside.items()}
        if self.ranks.writes:
            self._writer.start(lambda: self.folder.write(step, archive))
        self._last, self._saved = time.monotonic(), self._progress()

    def _progress(self) -> tuple[int, int]:
        """Steps and updates so far: updates may follow the last step."""
        return self.model.num_timesteps, self.model._n_updates


def copied(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Groups of tensors that later steps do not change."""
    return {
        group: {name: tensor.detach().clone() for name, tensor in named.items()}
        for group, named in tensors.items()
    }
