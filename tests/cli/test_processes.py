"""Tests of ``rlxf train gtrxl --workers``: environments in worker processes."""

from pathlib import Path

import gymnasium
import pytest

from rlxf.cli import main
from rlxf.training import read_archive
from tests.cli.running import TINY, refused

HOPELESS = "rlxf-test/Hopeless-v0"


@pytest.fixture
def hopeless():
    """Register an environment that always fails."""
    gymnasium.register(HOPELESS, "tests.envs.faulty_envs:Hopeless")
    yield
    del gymnasium.registry[HOPELESS]


def weights(run):
    return read_archive(Path(run) / "checkpoint.zip").tensors["policy"]


@pytest.mark.thorough
@pytest.mark.slow
def test_workers_train_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for workers in ("0", "2"):
        main(["train", "gtrxl", "--env", "CartPole-v1", *TINY, "--workers", workers, "--run", workers])
    none, two = weights("0"), weights("2")
    assert none.keys() == two.keys()
    assert all((none[name] == two[name]).all() for name in none)
    assert "env/lost_steps" in Path("2/progress.csv").read_text()
    assert "env/lost_steps" not in Path("0/progress.csv").read_text()


@pytest.mark.faults
def test_too_many_failures_are_reported_in_one_line(tmp_path, monkeypatch, capsys, hopeless):
    monkeypatch.chdir(tmp_path)
    message = refused(
        capsys, "train", "gtrxl", "--env", HOPELESS, *TINY, "--workers", "2", "--env-restarts", "0"
    )
    assert "environment 0 raised in step: ValueError: the simulator lost its mind" in message
    assert "faulty_envs.py, line" in message
    assert "1 time in a row" in message


def test_numbers_out_of_range_are_rejected(capsys):
    assert "workers must be at least 1, got -1" in refused(
        capsys, "train", "gtrxl", "--env", "CartPole-v1", "--workers", "-1"
    )
    assert "--env-timeout needs worker processes, and --workers is 0" in refused(
        capsys, "train", "gtrxl", "--env", "CartPole-v1", "--env-timeout", "5"
    )
    assert "got 0" in refused(
        capsys, "train", "gtrxl", "--env", "CartPole-v1", "--workers", "1", "--env-timeout", "0"
    )
