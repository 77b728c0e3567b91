"""Errors say what a file or a folder holds, and what opens it."""

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
from rlxf.training.contents import describe, describe_file
from tests.datasets import record_random

SMALL = {"memory_length": 4, "n_steps": 8, "segment_length": 8, "batch_size": 16, "n_envs": 2}


def load_statistics(path):
    return load_normalizer(path, make_vec_env("CartPole-v1", 1))


OPENERS = {
    "GTrXLPPO": GTrXLPPO.load,
    "DecisionTransformer": DecisionTransformer.load,
    "MaskedPretraining": MaskedPretraining.load,
    "VecNormalize": load_statistics,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each kind, by its name."""
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


@pytest.mark.parametrize("held", OPENERS)
@pytest.mark.parametrize("opener", OPENERS)
def test_a_file_of_another_kind_is_named_with_what_opens_it(files, opener, held):
    path = files / f"{held}.zip"
    if opener == held:
        OPENERS[opener](path)
        return
    with pytest.raises(CheckpointError) as refused:
        OPENERS[opener](path)
    assert str(refused.value).startswith(f"{path} is whole, but holds no ")
    opens = "rlxf.training.load_normalizer" if held == "VecNormalize" else f"{held}.load"
    assert re.search(rf"it holds .*{held}, which {opens} opens$", str(refused.value))


@pytest.mark.parametrize("opener", OPENERS)
def test_a_file_of_stable_baselines3_is_named_with_what_opens_it(tmp_path, opener):
    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu").save(tmp_path / "theirs.zip")
    with pytest.raises(CheckpointError, match=r"Stable-Baselines3 file.*rlxf\.import_sb3"):
        OPENERS[opener](tmp_path / "theirs.zip")


def test_a_file_of_your_own_is_named_by_its_members(tmp_path):
    write_archive(tmp_path / "mine.zip", {"settings": {}}, {"weights": {"w": torch.zeros(1)}})
    told = describe(read_archive(tmp_path / "mine.zip"))
    assert told == "settings, weights, which rlxf.training.read_archive opens"


def test_a_name_in_a_file_is_not_repeated_unless_it_is_known(tmp_path):
    write_archive(tmp_path / "odd.zip", {"agent": {"name": "\x1b[31mevil"}}, {})
    assert "evil" not in describe(read_archive(tmp_path / "odd.zip"))


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "noise.zip").write_bytes(b"noise")
    assert "it is no zip file" in describe_file(tmp_path / "noise.zip")


@pytest.fixture
def runs(tmp_path):
    """A folder with two runs, as the demonstration leaves it."""
    for name in ("gtrxl", "decision_transformer"):
        RunFolder.create(tmp_path / "demo" / name, {"agent": name}).checkpoint.touch()
    (tmp_path / "demo" / "datasets").mkdir()
    return tmp_path


@pytest.mark.parametrize("opener", OPENERS)
def test_the_folder_of_a_run_is_answered_with_its_checkpoint(runs, opener):
    folder = runs / "demo" / "gtrxl"
    told = re.escape(f"{folder} is the folder of a run; give the file {folder / 'checkpoint.zip'}")
    with pytest.raises(IsADirectoryError, match=told):
        OPENERS[opener](folder)


def test_a_folder_of_runs_is_answered_with_a_checkpoint_inside(runs):
    told = re.escape(f"such as {runs / 'demo' / 'decision_transformer' / 'checkpoint.zip'}")
    with pytest.raises(IsADirectoryError, match=told):
        GTrXLPPO.load(runs / "demo")


def test_a_folder_beside_a_file_of_its_name_is_no_matter(files, tmp_path):
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent.zip").write_bytes((files / "GTrXLPPO.zip").read_bytes())
    assert isinstance(GTrXLPPO.load(tmp_path / "agent"), GTrXLPPO)


@pytest.mark.parametrize("levels", [0, 1])
def test_the_runs_inside_a_folder_are_listed(runs, levels):
    folder = runs if levels else runs / "demo"
    shown = ", ".join(str(runs / "demo" / name) for name in ("decision_transformer", "gtrxl"))
    with pytest.raises(FileNotFoundError) as refused:
        RunFolder.open(folder)
    assert str(refused.value) == f"{folder} is no run folder, but holds 2: give one of {shown}"


def test_of_many_runs_some_are_listed(tmp_path):
    for number in range(15):
        RunFolder.create(tmp_path / f"run-{number:02}", {})
    with pytest.raises(FileNotFoundError, match=r"holds 15: give one of .*run-11 and 3 more$"):
        RunFolder.open(tmp_path)


def test_a_file_of_a_run_is_answered_with_its_folder(runs):
    folder = runs / "demo" / "gtrxl"
    with pytest.raises(NotADirectoryError, match=re.escape(f"give the folder of its run, {folder}")):
        RunFolder.open(folder / "checkpoint.zip")


@pytest.mark.parametrize("held", OPENERS)
def test_a_file_in_place_of_a_run_folder_is_described(files, held):
    with pytest.raises(NotADirectoryError, match=rf"it holds .*{held}, which .* opens"):
        RunFolder.open(files / f"{held}.zip")
