"""Tests of errors for files that do not fit: their contents, descriptions and differences."""

import re
from dataclasses import replace

import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.common.cores import core_difference
from rlxf.agents.common.weights import WEIGHTLESS_OPTIONS, check_same_core
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.gtrxl import gtrxl
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.attention import XL, Add, GRUGate
from rlxf.envs import make_vec_env
from rlxf.training import (
    CheckpointError,
    RunFolder,
    load_normalizer,
    read_archive,
    save_normalizer,
    write_archive,
)
from rlxf.training.compat import VERSION, check_known, checkpoint_errors, checkpoint_errors_unless_overridden
from rlxf.training.file_contents import describe, describe_file
from rlxf.training.json_rules import first_difference
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
        RunFolder.create(tmp_path / "demo" / name, {"agent": name}).final_checkpoint.touch()
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


@pytest.mark.parametrize("error", [AttributeError, KeyError, RuntimeError, TypeError, ValueError])
def test_errors_become_checkpoint_errors(error):
    with pytest.raises(CheckpointError, match=r"cannot build its agent.*width"), checkpoint_errors():
        raise error("width")


def test_checkpoint_errors_propagate_unchanged():
    with pytest.raises(CheckpointError, match=r"^pass policy=Mine$"), checkpoint_errors():
        raise CheckpointError("pass policy=Mine")


def test_unrelated_errors_propagate_unchanged():
    with pytest.raises(ZeroDivisionError), checkpoint_errors():
        raise ZeroDivisionError


def test_errors_propagate_if_the_user_passed_settings():
    with pytest.raises(ValueError, match=r"^gamma$"), checkpoint_errors_unless_overridden({"gamma": 7}):
        raise ValueError("gamma")
    with pytest.raises(CheckpointError, match="gamma"), checkpoint_errors_unless_overridden({}):
        raise ValueError("gamma")


def test_known_settings_pass():
    check_known({"gamma": 1}, ["gamma", "seed"], "9.9")


@pytest.mark.parametrize(("writer", "name"), [("9.9", "rlxf 9.9"), (None, "an unknown version of rlxf")])
def test_unknown_settings_are_reported_with_the_version_of_the_file(writer, name):
    loader = "the version that wrote it" if writer is None else name
    message = (
        f"by {name} and has the settings a, b, which rlxf {VERSION} does not know; load it with {loader}$"
    )
    with pytest.raises(CheckpointError, match=message):
        check_known({"gamma": 1, "b": 2, "a": 3}, ["gamma"], writer)


def test_unknown_setting_of_the_same_version_is_reported_as_altered():
    with pytest.raises(CheckpointError, match="it was altered, or written by other code under the same"):
        check_known({"a": 3}, ["gamma"], VERSION)


CORE = gtrxl(16, width=16, layers=2, heads=2)


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (1, 1, None),
        (1, 2, ("core", 1, 2)),
        ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, ("core.b.c", 2, 3)),
        ({"a": 1}, {"a": 1, "b": 2}, ("core.b", None, 2)),
        ({"name": "Add"}, {"name": "GRUGate", "bias": 2}, ("core", "Add", "GRUGate")),
        ({"name": "GRUGate", "bias": 1}, {"name": "GRUGate", "bias": 2}, ("core.bias", 1, 2)),
        (None, {"name": "RoPE", "base": 3}, ("core", None, "RoPE")),
        ([{"name": "RoPE"}], [{"name": "Add"}], ("core", [{"name": "RoPE"}], [{"name": "Add"}])),
    ],
)
def test_first_difference(theirs, ours, expected):
    assert first_difference("core", theirs, ours) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"memory": XL(9)}, None),
        ({"width": 32}, ("width", 16, 32)),
        ({"feed_forward": 65}, ("feed_forward", 64, 65)),
        ({"residual": GRUGate(bias=3.0)}, ("residual.bias", 2.0, 3.0)),
        ({"residual": Add()}, ("residual", "GRUGate", "Add")),
    ],
)
def test_difference_of_two_cores_names_one_option(changes, expected):
    other = replace(CORE, **changes)
    assert core_difference(CORE, other, WEIGHTLESS_OPTIONS) == expected
    if expected is None:
        check_same_core(CORE, other)
        return
    name, theirs, ours = expected
    message = f"their core has {name}={theirs}, the agent's has {name}={ours}; build both with the same core"
    with pytest.raises(ValueError, match=message):
        check_same_core(CORE, other)
