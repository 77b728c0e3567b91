"""Tests of file permissions: files of commands are not writable by others, for every umask."""

import os

import pytest

from rlxf import DecisionTransformer, collect
from rlxf.cli import main
from rlxf.envs import make_vec_env
from tests.cli.running import train
from tests.datasets import ID


@pytest.fixture(autouse=True)
def _permissive_umask():
    before = os.umask(0)
    yield
    after = os.umask(before)
    assert after == 0, "the umask of the process should not change"


def writable_by_others(folder):
    """Return the files and folders that are writable by group or others."""
    return [path for path in folder.rglob("*") if path.stat().st_mode & 0o022]


@pytest.mark.thorough
def test_permissions_of_files_written_by_commands(minari_root, tmp_path):
    train("--run", "runs/online", "--checkpoint-seconds", "0", "--evaluate-every", "32")
    main(["collect", "runs/online", "--dataset", ID, "--episodes", "4", "--no-progress-bar"])
    offline = ["--updates", "2", "--episodes", "2", "--batch-size", "4", "--no-progress-bar"]
    main(["train", "dt", "--dataset", ID, "--run", "runs/offline", "--target-returns", "0", "1", *offline])
    assert (tmp_path / "runs/offline/targets.png").exists()
    assert (tmp_path / "cache").exists()
    assert writable_by_others(tmp_path) == [minari_root]  # created by the fixture


def test_permissions_of_files_written_by_the_python_api(minari_root, tmp_path):
    collect(None, make_vec_env("rlxf/TMaze-v0", 2), ID, episodes=4)
    DecisionTransformer(ID, device="cpu").save(tmp_path / "new/agent.zip")
    assert (tmp_path / "new/agent.zip").stat().st_mode & 0o777 == 0o644
    assert writable_by_others(tmp_path) == [minari_root]  # created by the fixture
