"""Benign runs and datasets, from which malicious files are made, and commands in this process."""

import contextlib
import io
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATASET = "stranger/benign-v0"
SIZES = "--core.width 8 --core.heads 2 --no-progress-bar"
ONLINE = (
    "train gtrxl --env CartPole-v1 --n-envs 2 --n-steps 16 --segment-length 8 --batch-size 16"
    " --core.memory.length 4 --total-timesteps 64 --episodes 2 --attention-maps-every None --no-videos"
    f" --evaluation-episodes 2 --checkpoint-seconds 0 --run runs/gtrxl {SIZES}"
)
OFFLINE = f"train dt --updates 3 --episodes 2 --batch-size 4 --context-length 3 --core.layers 1 {SIZES}"
PLAY = "--episodes 2 --no-progress-bar"
BENIGN = (
    ONLINE,
    f"evaluate runs/gtrxl {PLAY}",
    f"collect runs/gtrxl --dataset {DATASET} --episodes 8 --no-progress-bar",
    f"{OFFLINE} --dataset {DATASET} --run runs/dt --evaluate-every 2 --checkpoint-seconds 0",
    f"evaluate runs/dt --target-returns 9 10 {PLAY}",
    f"evaluate runs/dt --env Nowhere-v0 {PLAY}",
    f"evaluate runs/gtrxl --datastore {DATASET} {PLAY}",
    f"pretrain --dataset {DATASET} --updates 2 --batch-size 4 --run runs/pre {SIZES}",
    "distill runs/gtrxl --steps 32 --run runs/student --no-progress-bar",
    "datasets",
)
"""Commands on benign files; after them, everything that rlxf needs is imported."""


class World:
    """Folder with benign runs, a benign dataset, and a folder of files that must not change.

    Args:
        root: an empty folder, which becomes the working directory.
    """

    def __init__(self, root: Path):
        self.root = root.resolve()
        os.chdir(self.root)
        self.victims = self.root / "victims"
        self.minari, self.cache = self.root / "minari", self.root / "cache"
        for folder in (self.victims, self.minari, self.cache, self.root / "tmp", self.root / "runs"):
            folder.mkdir()
        self.restore()
        os.environ |= {"MINARI_DATASETS_PATH": str(self.minari), "RLXF_CACHE": str(self.cache)}
        os.environ |= {"TMPDIR": str(self.root / "tmp"), "MPLCONFIGDIR": str(self.root / "tmp")}
        module = self.root / "stranger"
        module.mkdir()
        (module / "__init__.py").write_text("open('victims/ran', 'w')\n")
        (module / "notes.py").write_text("open('victims/ran', 'w')\n")

    @property
    def writable(self) -> list[Path]:
        """Folders in which commands may write."""
        return [self.minari, self.cache, self.root / "tmp", self.root / "runs"]

    def benign(self) -> None:
        """Create runs and dataset, and resume copies of the runs."""
        for command in BENIGN:
            self.run(command)
        for name in ("gtrxl", "dt"):
            self.run(f"resume {self.cut_off(name, 'benign')}")

    def run(self, command: str) -> tuple[int, str]:
        """Run a command; return its exit status and its output."""
        from rlxf.cli import main

        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                main(shlex.split(command))
            except SystemExit as exit_:
                return int(exit_.code or 0), output.getvalue()
        return 0, output.getvalue()

    def copy(self, name: str, what: str) -> Path:
        """Copy a run; return its path relative to the working directory."""
        path = Path("runs", f"{name}-{what}")
        shutil.copytree(Path("runs", name), path)
        return path

    def cut_off(self, name: str, what: str) -> Path:
        """Copy a run in the state after a kill, without its newest checkpoints."""
        path = self.copy(name, what)
        oldest, *others = sorted((path / "checkpoints").iterdir())
        kept = {"config.json", "progress.csv", "checkpoints", "normalizer.zip"}
        for each in (*others, *(each for each in path.iterdir() if each.name not in kept)):
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        assert oldest.exists()
        return path

    def dataset(self, what: str, change: Callable[[dict[str, Any]], None] = lambda metadata: None) -> str:
        """Copy the dataset with modified metadata; return the id of the copy."""
        dataset_id = f"stranger/{what}-v0"
        shutil.copytree(self.minari / DATASET, self.minari / dataset_id)
        file = self.minari / dataset_id / "data/metadata.json"
        metadata = json.loads(file.read_text()) | {"dataset_id": dataset_id}
        change(metadata)
        file.write_text(json.dumps(metadata))
        return dataset_id

    def episodes(self, dataset_id: str) -> Path:
        """Return the HDF5 file of a dataset."""
        return self.minari / dataset_id / "data/main_data.hdf5"

    def restore(self) -> None:
        """Undo the effects of an attack: remove imported modules and restore changed files."""
        for name in [name for name in sys.modules if name.partition(".")[0] in {"stranger", "antigravity"}]:
            del sys.modules[name]
        for path in self.victims.iterdir():
            path.unlink()
        (self.victims / "text").write_text("mine")

    def untouched(self) -> bool:
        """Return whether the victim files are unchanged."""
        names = sorted(path.name for path in self.victims.iterdir())
        return names == ["text"] and (self.victims / "text").read_bytes() == b"mine"


def configured(path: Path, **changes: Any) -> Path:
    """Modify the ``config.json`` of a run."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def spec_of(metadata: dict[str, Any], **changes: Any) -> str:
    """Return a modified ``env_spec`` of a dataset."""
    return json.dumps(json.loads(metadata["env_spec"]) | changes)
