"""Experiment trackers: the output format of SB3's logger that sends values to W&B, Trackio or MLflow."""

import atexit
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any

import numpy as np
from stable_baselines3.common.logger import Figure, KVWriter, Logger, Video

from rlxf.training.run_folder import RunFolder
from rlxf.training.strict_json import load_json_file, write_json_file
from rlxf.training.tracker_backends import BACKENDS, Media, TrackerBackend
from rlxf.utils.extras import install_command
from rlxf.utils.gif import encode_gif, video_frames
from rlxf.utils.run_files import PROGRESS
from rlxf.utils.warnings import warn_user

TRACKER = "tracker.json"
"""Name of the file with the tracker and the id of its run in the folder of a run."""
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Pattern of the id of a run of a tracker."""
PATIENCE = 30.0
"""Seconds that `TrackerOutput.close` waits for a tracker."""
MAX_WAITING = 1000
"""Maximum number of entries that wait for a slow tracker; further entries are dropped."""


def check_tracker(name: str | None) -> None:
    """Raise an error if a tracker does not exist or its package is not installed; None needs no package.

    Raises:
        ValueError: if there is no tracker of this name.
        ImportError: if its package is not installed.
    """
    if name is None:
        return
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"track must be {', '.join(BACKENDS)} or None, got {reprlib.repr(name)}")
    if find_spec(name) is None:
        raise ImportError(
            f"--track {name} requires the package {name}: run {install_command('track')}, or train without "
            f"--track"
        )


class TrackerOutput(KVWriter):
    """Output format of SB3's logger that sends scalars, figures and videos to an experiment tracker.

    Text, histograms, images and hyperparameters are ignored, and so are the formats that a value excludes:
    they name the formats of SB3. A thread of its own calls the tracker, so a server that does not answer
    delays the training only at the end, by at most `PATIENCE` seconds. A logger that is not closed is closed
    at the end of the program. Errors of the tracker do not end the training: the first one is reported by one
    UserWarning.

    Args:
        backend: the tracker.
        run_id: id of the run of the tracker to continue; None for a new one.
        on_start: function that gets the id of the run of the tracker when it is started.
    """

    def __init__(
        self,
        backend: TrackerBackend,
        run_id: str | None = None,
        on_start: Callable[[str], None] = lambda run_id: None,
    ):
        self.backend = backend
        self._fault = ""
        self._has_warned = False
        self._is_closed = False
        self._entries: Queue[Callable[[], None] | None] = Queue(MAX_WAITING)
        arguments = (run_id, on_start)
        self._thread = Thread(target=self._work, args=arguments, name="tracker", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # for a logger that is not closed: the thread ends with the program

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Send the scalars, figures and videos among the values."""
        scalars = {tag: float(value) for tag, value in key_values.items() if _is_scalar(value)}
        media = {tag: encoded for tag, value in key_values.items() if (encoded := _encode(value))}
        self._put(lambda: self.backend.log(scalars, media, step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Send a table."""
        self._put(lambda: self.backend.table(name, columns, rows, step))

    def close(self) -> None:
        """Send what is left and end the run of the tracker. Further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._put(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self._fault = self._fault or f"it did not answer within {PATIENCE:g} seconds"
        self._warn()

    def _put(self, entry: Callable[[], None] | None) -> None:
        if self._is_closed and entry is not None:
            return
        try:
            self._entries.put_nowait(entry)
        except Full:
            self._fault = self._fault or f"it is slower than the training: {MAX_WAITING} entries wait for it"
            if entry is None:
                self._discard()
        self._warn()

    def _discard(self) -> None:
        """Drop an entry to make room for the end of the queue."""
        with suppress(Empty):
            self._entries.get_nowait()
        self._entries.put_nowait(None)

    def _warn(self) -> None:
        if not self._fault or self._has_warned:
            return
        self._has_warned = True
        folder = self.backend.folder
        warn_user(
            f"{folder} is not tracked completely by {self.backend.package}: {self._fault}. The training is "
            f"not affected, and {folder / PROGRESS} and the TensorBoard events contain all values"
        )

    def _work(self, run_id: str | None, on_start: Callable[[str], None]) -> None:
        """Start the run, call the entries of the queue, and finish the run."""
        is_started = self._attempt("start", lambda: on_start(self.backend.start(run_id)))
        if not self._is_closed:  # before functions that the package has registered meanwhile
            atexit.unregister(self.close)
            atexit.register(self.close)
        self._fault = self._fault or self.backend.note
        while (entry := self._entries.get()) is not None:
            if is_started:
                self._attempt("log", entry)
        if is_started:
            self._attempt("finish", self.backend.finish)

    def _attempt(self, name: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except BaseException as error:  # a package may even call sys.exit
            lines = str(error).splitlines() or [""]
            self._fault = self._fault or f"{name} failed with {type(error).__name__}: {lines[0][:300]}"
            return False
        return True


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _encode(value: Any) -> Media | None:
    """Encode a figure or a video; return None for other values."""
    if isinstance(value, Figure):
        content = BytesIO()
        value.figure.savefig(content, format="png")
        return Media(content.getvalue(), "png")
    if isinstance(value, Video):
        return Media(encode_gif(video_frames(value), value.fps), "gif")
    return None


def attach_tracker(logger: Logger, name: str | None, folder: Path, config: Mapping[str, Any]) -> Logger:
    """Add an experiment tracker to a logger, and return the logger.

    A run that was tracked before continues the same run of the tracker, whose id is in ``tracker.json``.

    Args:
        logger: logger of Stable-Baselines3.
        name: "wandb", "trackio" or "mlflow"; None for no tracker.
        folder: folder of the run; its name is the name of the run.
        config: configuration of the run, a JSON object.

    Warns:
        UserWarning: if ``tracker.json`` is invalid; a new run of the tracker is then started.
    """
    if name is not None:
        backend = BACKENDS[name](folder, config)
        run_id = read_run_id(folder, name)
        output = TrackerOutput(backend, run_id, lambda new: _save_run_id(folder, name, new))
        logger.output_formats.append(output)
    return logger


def tracked(make_logger: Callable[[], Logger], name: str | None, run: RunFolder) -> Callable[[], Logger]:
    """Return a function that makes a logger with `attach_tracker`."""
    return lambda: attach_tracker(make_logger(), name, run.path, run.config)


def read_run_id(folder: Path, name: str) -> str | None:
    """Return the id of the run of a tracker in ``tracker.json``; None if there is none.

    Warns:
        UserWarning: if the file is invalid.
    """
    file = folder / TRACKER
    try:
        document = load_json_file(file)
        run_id = document["id"] if document["tracker"] == name else None
        if run_id is None or RUN_ID.fullmatch(run_id):
            return run_id
        fault = f"the id must match {RUN_ID.pattern}"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = f"{type(error).__name__}: {str(error)[:200]}"
    warn_user(f"{file} is invalid ({fault}): a new {name} run is started")
    return None


def _save_run_id(folder: Path, name: str, run_id: str) -> None:
    write_json_file(folder / TRACKER, {"tracker": name, "id": run_id})


def tracker_outputs(logger: Logger) -> list[TrackerOutput]:
    """Return the output formats of a logger that are experiment trackers."""
    return [output for output in logger.output_formats if isinstance(output, TrackerOutput)]
