"""Tests of error messages that describe the content of a file or folder and the function that loads it."""

import re

import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.envs import make_vec_env
from rlxf.training import (
    CheckpointError,
    RunFolder,
    load_normalizer,
    read_archive,
    save_normalizer,
    write_archive,
)
from rlxf.training.compat import describe, describe_file
from tests.datasets import record_random

SMALL = {"memory_length": 4, "n_steps": 8, "segment_length": 8, "batch_size": 16, "n_envs": 2}


def load_statistics(path):
    return load_normalizer(path, make_vec_env("CartPole-v1", 1))


LOADERS = {
    "GTrXLPPO": GTrXLPPO.load,
    "DecisionTransformer": DecisionTransformer.load,
    "MaskedPretraining": MaskedPretraining.load,
    "VecNormalize": load_statistics,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with a file of each kind, named by its content."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        (folder / "minari").mkdir()
        patch.setenv("MINARI_DATASETS_PATH", str(folder / "minari"))
        patch.setenv("RLXF_CACHE", str(folder / "cache"))
        record_random((4, 3), "test/some-v0")
        offline = {"context_length": 2, "core": decision_transformer(width=8, layers=1, heads=1)}
        GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", **SMALL).save(folder / "GTrXLPPO.zip")
        DecisionTransformer("test/some-v0", **offline).save(folder / "DecisionTransformer.zip")
        MaskedPretraining("test/some-v0", **offline).save(folder / "MaskedPretraining.zip")
    save_normalizer(folder / "VecNormalize.zip", VecNormalize(make_vec_env("CartPole-v1", 1)))
    return folder


@pytest.mark.parametrize("content", LOADERS)
@pytest.mark.parametrize("loader", LOADERS)
def test_file_of_another_kind_is_described_with_its_loader(files, loader, content):
    path = files / f"{content}.zip"
    if loader == content:
        LOADERS[loader](path)
        return
    with pytest.raises(CheckpointError) as raised:
        LOADERS[loader](path)
    assert str(raised.value).startswith(f"{path} is valid, but contains no ")
    function = "rlxf.training.load_normalizer" if content == "VecNormalize" else f"{content}.load"
    assert re.search(rf"it contains .*{content}, which {function} loads$", str(raised.value))


@pytest.mark.parametrize("loader", LOADERS)
def test_file_of_stable_baselines3_is_described_with_its_loader(tmp_path, loader):
    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu").save(tmp_path / "theirs.zip")
    with pytest.raises(CheckpointError, match=r"Stable-Baselines3 file.*rlxf\.import_sb3"):
        LOADERS[loader](tmp_path / "theirs.zip")


def test_unknown_file_is_described_by_its_members(tmp_path):
    write_archive(tmp_path / "mine.zip", {"settings": {}}, {"weights": {"w": torch.zeros(1)}})
    message = describe(read_archive(tmp_path / "mine.zip"))
    assert message == "settings, weights, which rlxf.training.read_archive reads"


def test_unknown_agent_name_is_not_printed(tmp_path):
    write_archive(tmp_path / "odd.zip", {"agent": {"name": "\x1b[31mevil"}}, {})
    assert "evil" not in describe(read_archive(tmp_path / "odd.zip"))


def test_unreadable_file_is_described_by_its_error(tmp_path):
    (tmp_path / "noise.zip").write_bytes(b"noise")
    assert "it is not a zip file" in describe_file(tmp_path / "noise.zip")


@pytest.fixture
def runs(tmp_path):
    """Return a folder with two runs, as written by the demo."""
    for name in ("gtrxl", "decision_transformer"):
        RunFolder.create(tmp_path / "demo" / name, {"agent": name}).checkpoint.touch()
    (tmp_path / "demo" / "datasets").mkdir()
    return tmp_path


@pytest.mark.parametrize("loader", LOADERS)
def test_run_folder_instead_of_file_suggests_its_checkpoint(runs, loader):
    folder = runs / "demo" / "gtrxl"
    message = re.escape(f"{folder} is the folder of a run; give the file {folder / 'checkpoint.zip'}")
    with pytest.raises(IsADirectoryError, match=message):
        LOADERS[loader](folder)


def test_folder_of_runs_suggests_a_checkpoint_inside(runs):
    message = re.escape(f"such as {runs / 'demo' / 'decision_transformer' / 'checkpoint.zip'}")
    with pytest.raises(IsADirectoryError, match=message):
        GTrXLPPO.load(runs / "demo")


def test_folder_with_the_name_of_the_file_is_ignored(files, tmp_path):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent.zip").write_bytes((files / "GTrXLPPO.zip").read_bytes())
    assert isinstance(GTrXLPPO.load(tmp_path / "agent"), GTrXLPPO)


@pytest.mark.parametrize("levels", [0, 1])
def test_runs_inside_a_folder_are_listed(runs, levels):
    folder = runs if levels else runs / "demo"
    listed = ", ".join(str(runs / "demo" / name) for name in ("decision_transformer", "gtrxl"))
    with pytest.raises(FileNotFoundError) as raised:
        RunFolder.open(folder)
    assert str(raised.value) == f"{folder} is not a run folder, but contains 2 of them: give one of {listed}"


def test_list_of_runs_is_limited(tmp_path):
    for number in range(15):
        RunFolder.create(tmp_path / f"run-{number:02}", {})
    with pytest.raises(FileNotFoundError, match=r"contains 15 of them: give one of .*run-11 and 3 more$"):
        RunFolder.open(tmp_path)


def test_file_of_a_run_suggests_its_run_folder(runs):
    folder = runs / "demo" / "gtrxl"
    with pytest.raises(NotADirectoryError, match=re.escape(f"give the folder of its run, {folder}")):
        RunFolder.open(folder / "checkpoint.zip")


@pytest.mark.parametrize("content", LOADERS)
def test_file_instead_of_run_folder_is_described(files, content):
    with pytest.raises(NotADirectoryError, match=rf"it contains .*{content}, which .* loads"):
        RunFolder.open(files / f"{content}.zip")
