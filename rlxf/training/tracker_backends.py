"""Backends of experiment trackers: W&B, Trackio and MLflow.

The packages are imported by `TrackerBackend.start`. All methods of a backend are called by one thread.
"""

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from rlxf.training.resumed_logger import STEP
from rlxf.training.strict_json import dump_json

PROJECT = "rlxf"
"""Default name of the project, or of the experiment in MLflow."""
TIMEOUT = 10
"""Seconds after which a request to a server is given up."""


@dataclass(frozen=True)
class Media:
    """Encoded picture or film.

    Args:
        data: content of the file.
        suffix: "png" for a picture, "gif" for a film.
    """

    data: bytes
    suffix: str

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Yield a temporary file with this content, and remove it afterwards."""
        with TemporaryDirectory() as folder:
            path = Path(folder, f"{name}.{self.suffix}")
            path.write_bytes(self.data)
            yield path


class TrackerBackend(ABC):
    """Client of an experiment tracker, for one run.

    Args:
        folder: folder of the run; its name is the name of the run.
        config: configuration of the run, a JSON object.
    """

    package: str
    """Name of the package, and of the tracker."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        self.folder = folder
        self.config = dict(config)
        self.note = ""
        """Message for the user about a degraded operation; empty if there is none."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.folder.resolve().name

    @abstractmethod
    def start(self, run_id: str | None) -> str:
        """Import the package, start a run or continue one, and return its id.

        Args:
            run_id: id of the run to continue; None for a new run.
        """

    @abstractmethod
    def log(self, scalars: Mapping[str, float], media: Mapping[str, Media], step: int) -> None:
        """Log values at a step, by tag."""

    @abstractmethod
    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a table."""

    @abstractmethod
    def finish(self) -> None:
        """Send what is left, and end the run."""


class WandB(TrackerBackend):
    """Weights & Biases.

    Without a login or a connection the run is recorded offline, in the folder ``wandb`` of the run. The axis
    of all charts is `STEP`, because the step of W&B itself cannot decrease when a run is resumed.
    """

    package = "wandb"

    def start(self, run_id: str | None) -> str:
        """Start a run online, or offline if that is not possible."""
        import wandb

        self.module = wandb
        new_id = run_id or os.urandom(8).hex()
        mode = self._mode()
        try:
            self.run = self._init(new_id, mode)
        except Exception as error:
            if mode != "online":
                raise
            wandb.teardown(exit_code=1)  # else the id is in use
            self._explain(f"W&B is not available ({_short(error)})")
            self.run = self._init(new_id, "offline")
        self._remove_links()
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        return new_id

    def _remove_links(self) -> None:
        """Remove the symbolic links to log files, because commands refuse a run folder with links."""
        for path in (self.folder / "wandb").rglob("*"):
            if path.is_symlink():
                path.unlink()

    def _mode(self) -> str:
        mode = str(self.module.setup().settings.mode)
        if mode != "online" or self.module.login(prompt=False, verify=False):
            return mode
        self._explain("W&B has no login")
        return "offline"

    def _explain(self, reason: str) -> None:
        files = self.folder / "wandb" / "offline-run-*"
        self.note = f"{reason}: the run is recorded offline; upload it with: wandb sync {files}"

    def _init(self, run_id: str, mode: Any) -> Any:
        settings = self.module.Settings(
            init_timeout=TIMEOUT,
            finish_timeout=2 * TIMEOUT,
            console="off",  # the output of the commands is redrawn in place
            symlink=False,
            silent=True,
            disable_git=True,
            disable_code=True,
        )
        return self.module.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=str(self.folder.resolve()),  # the process of W&B keeps its working directory
            id=run_id,
            name=self.name,
            config=self.config,
            mode=mode,
            resume="allow" if mode == "online" else None,
            allow_val_change=True,
            reinit="create_new",
            settings=settings,
        )

    def log(self, scalars: Mapping[str, float], media: Mapping[str, Media], step: int) -> None:
        """Log values with the step as `STEP`."""
        values = {tag: self._convert(each) for tag, each in media.items()}
        self.run.log({**scalars, **values, STEP: step})

    def _convert(self, media: Media) -> Any:
        content = BytesIO(media.data)
        if media.suffix == "gif":
            return self.module.Video(content, format="gif")
        return self.module.Image(Image.open(content))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a ``wandb.Table``."""
        data = [list(row) for row in rows]
        self.run.log({name: self.module.Table(columns=list(columns), data=data), STEP: step})

    def finish(self) -> None:
        """Upload what is left, for at most twice `TIMEOUT` seconds."""
        self.run.finish()
        self._remove_links()


class Trackio(TrackerBackend):
    """Trackio, which stores runs in a folder of the user or in a Hugging Face Space."""

    package = "trackio"

    def start(self, run_id: str | None) -> str:
        """Start a run, or continue the newest run of this name."""
        import trackio

        self.module = trackio
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        resume = "never" if run_id is None else "allow"
        self.run = trackio.init(project, name=self.name, config=self.config, resume=resume, embed=False)
        if run_id not in (None, self.run.id):
            self.note = f"the run {run_id} is not the newest Trackio run {self.name}: {self.run.id} is used"
        return str(self.run.id)

    def log(self, scalars: Mapping[str, float], media: Mapping[str, Media], step: int) -> None:
        """Log values at a step."""
        with ExitStack() as files:  # Trackio copies files when they are logged
            values = {tag: self._convert(each, files) for tag, each in media.items()}
            if values or scalars:
                self.run.log({**scalars, **values}, step=step)

    def _convert(self, media: Media, files: ExitStack) -> Any:
        if media.suffix == "png":
            return self.module.Image(Image.open(BytesIO(media.data)))
        return self.module.Video(str(files.enter_context(media.file("film"))))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a ``trackio.Table``."""
        data = [list(row) for row in rows]
        self.run.log({name: self.module.Table(columns=list(columns), data=data)}, step=step)

    def finish(self) -> None:
        """Write what is left."""
        self.run.finish()


LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(TIMEOUT),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",  # jitter draws from Python's global generator
}
"""Defaults of MLflow's environment variables."""
MAX_PARAMS, MAX_LENGTH = 100, 500
"""Limits of MLflow: parameters in a request, and characters of a value."""


class MLflow(TrackerBackend):
    """MLflow, with the tracking server or store of the user."""

    package = "mlflow"

    def start(self, run_id: str | None) -> str:
        """Create a run with the configuration as parameters, or continue one."""
        for variable, value in LIMITS.items():
            os.environ.setdefault(variable, value)
        import mlflow

        self.client = mlflow.MlflowClient()
        self.entities = mlflow.entities
        if run_id is None:
            return self._create()
        self.client.update_run(run_id, status="RUNNING")
        self.run_id = run_id
        return run_id

    def _create(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if found is None else found.experiment_id
        self.run_id = str(self.client.create_run(experiment, run_name=self.name).info.run_id)
        entries = [
            self.entities.Param(_key(key), str(each)[:MAX_LENGTH]) for key, each in self.config.items()
        ]
        for first in range(0, len(entries), MAX_PARAMS):
            self.client.log_batch(self.run_id, params=entries[first : first + MAX_PARAMS])
        self.client.log_text(self.run_id, dump_json(self.config, indent=2).decode(), "config.json")
        return self.run_id

    def log(self, scalars: Mapping[str, float], media: Mapping[str, Media], step: int) -> None:
        """Log scalars as metrics, and media as artifacts ``media/TAG/STEP.png`` or ``.gif``."""
        now = int(time.time() * 1000)
        metrics = [self.entities.Metric(_key(tag), each, now, step) for tag, each in scalars.items()]
        if metrics:
            self.client.log_batch(self.run_id, metrics=metrics)
        for tag, each in media.items():
            with each.file(str(step)) as path:
                self.client.log_artifact(self.run_id, str(path), f"media/{_key(tag)}")

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a JSON artifact with the columns and rows."""
        content = {"columns": list(columns), "data": [list(row) for row in rows]}
        self.client.log_text(self.run_id, dump_json(content, indent=2).decode(), f"{name}.json")

    def finish(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.run_id)


def _key(tag: str) -> str:
    """Return a tag with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", tag)


def _short(error: Exception) -> str:
    """Return the first line of an error, at most 200 characters."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


BACKENDS: dict[str, type[TrackerBackend]] = {each.package: each for each in (WandB, Trackio, MLflow)}
"""Name of a tracker -> its backend."""
