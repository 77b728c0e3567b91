"""What commands write, others may not write, whatever the umask is."""

import os

import pytest

from rlxf import DecisionTransformer, collect
from rlxf.cli import main
from rlxf.envs import make_vec_env
from tests.cli.running import train
from tests.datasets import ID


@pytest.fixture(autouse=True)
def _a_careless_umask():
    before = os.umask(0)
    yield
    left = os.umask(before)
    assert left == 0, "the umask of the process is as it was"


def writable_by_others(folder):
    """Files and folders in it that group or others may write."""
    return [path for path in folder.rglob("*") if path.stat().st_mode & 0o022]


def test_runs_datasets_and_caches_of_commands(minari_root, tmp_path):
    train("--run", "runs/online", "--checkpoint-seconds", "0", "--evaluate-every", "32")
    main(["collect", "runs/online", "--dataset", ID, "--episodes", "4", "--no-progress-bar"])
    offline = ["--updates", "2", "--episodes", "2", "--batch-size", "4", "--no-progress-bar"]
    main(["train", "dt", "--dataset", ID, "--run", "runs/offline", "--target-returns", "0", "1", *offline])
    assert (tmp_path / "runs/offline/targets.png").exists()
    assert (tmp_path / "cache").exists()
    assert writable_by_others(tmp_path) == [minari_root]  # the test made it


def test_files_datasets_and_caches_of_python(minari_root, tmp_path):
    collect(None, make_vec_env("rlxf/TMaze-v0", 2), ID, episodes=4)
    DecisionTransformer(ID, device="cpu").save(tmp_path / "new/agent.zip")
    assert (tmp_path / "new/agent.zip").stat().st_mode & 0o777 == 0o644
    assert writable_by_others(tmp_path) == [minari_root]  # the test made it
