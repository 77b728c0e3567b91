"""Fixtures of the tests of commands."""

import pytest

from rlxf.experiments import execution
from rlxf.training.checkpoints import BackgroundWriter
from tests.cli.running import train
from tests.in_process import InProcessPool, train_in_process


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def in_foreground(monkeypatch):
    """Write checkpoints in the main thread, because no thread finishes after a simulated crash."""
    monkeypatch.setattr(BackgroundWriter, "start", lambda self, work: work())


@pytest.fixture
def runs_in_process(monkeypatch):
    """Train the runs of an experiment in this process, one after the other."""
    monkeypatch.setattr(execution, "_train", train_in_process)
    monkeypatch.setattr(execution, "local_executor", lambda processes: InProcessPool())


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Folder of a complete run on a T-Maze."""
    path = tmp_path_factory.mktemp("run") / "tmaze"
    extra = ["--attention-maps-every", "20", "--videos"]
    train(
        "--run",
        str(path),
        "--evaluate-every",
        "32",
        "--core.residual",
        "add",
        "--core.position=RoPE",
        *extra,
    )
    return path
