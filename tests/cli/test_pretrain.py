"""Tests of ``rlxf pretrain`` and ``--pretrained``: files of a run, transfer of weights, and errors."""

import inspect
import json
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from rlxf import DecisionTransformer
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.cli import main
from rlxf.cli.commands.train_offline import WindowOptions
from rlxf.cli.env_options import resume_trust_option
from rlxf.cli.runs import load_initial_weights
from rlxf.training import RunFolder
from tests.cli.running import TASK, refused
from tests.cli.running import TINY as TINY_ONLINE
from tests.datasets import ID, record_cartpole

CORE = shlex.split("--core.width 8 --core.layers 1 --core.position rope")
TINY = [*shlex.split("--log-interval 2 --context-length 4 --batch-size 4 --no-progress-bar"), *CORE]


@pytest.fixture
def data(minari_root):
    """Id of a dataset of random numbers that names CartPole-v1 as its environment."""
    record_cartpole()
    return ID


@pytest.fixture
def pretraining(data):
    """Folder of a pretraining."""
    main(["pretrain", "--dataset", data, "--updates", "4", *TINY])
    return Path("runs", "pretraining-test-small-v0-0")


def test_every_parameter_of_the_pretraining_is_an_option():
    window_options = {field.name for field in fields(WindowOptions)}
    other_options = {"dataset", "mask_probability", "predicted_tokens", "seed", "core", "download"}
    python_only = {"tensorboard_log", "verbose", "_init_setup_model"}
    assert (
        set(inspect.signature(MaskedPretraining).parameters) == window_options | other_options | python_only
    )


def test_files_of_a_run_and_transfer_of_weights(pretraining, data):
    config = json.loads((pretraining / "config.json").read_text())
    source = MaskedPretraining.load(pretraining / "checkpoint.zip", device="cpu")
    assert (config["agent"], config["dataset"], config["mask_probability"]) == ("pretraining", [data], 0.15)
    assert (source.num_timesteps, source.core.causal) == (4, False)
    assert (pretraining / "progress.csv").exists()

    agent = DecisionTransformer(data, 4, core=source.core.from_dict(config["core"] | {"causal": True}))
    load_initial_weights(agent, pretraining)
    expected, loaded = (each.policy.transformer.state_dict() for each in (source, agent))
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)

    run = ["--pretrained", str(pretraining), "--run", "tuned", "--updates", "2", "--episodes", "2"]
    main(["train", "dt", "--dataset", data, *TINY, *run])
    assert json.loads(Path("tuned", "config.json").read_text())["pretrained"] == str(pretraining)


def test_weights_that_only_the_file_of_a_run_names_need_trust(pretraining, data, capsys):
    """Such a file may be a stranger's, and the weights private ones."""
    run = ["--pretrained", str(pretraining), "--run", "tuned", "--updates", "2", "--episodes", "2"]
    main(["train", "dt", "--dataset", data, *TINY, *run])
    config = ["train", "dt", "--config", "tuned", "--run", "new"]
    assert "begins with the weights of another folder" in refused(capsys, *config)
    assert resume_trust_option(RunFolder.open("tuned").config) == " --trust"
    assert not Path("new").exists()
    main([*config, "--pretrained", str(pretraining)])
    main(["resume", "tuned", "--updates", "3"])  # it has a checkpoint
    for name in ("checkpoint.zip", "completed.json"):
        Path("tuned", name).unlink()
    shutil.rmtree("tuned/checkpoints")
    assert "add --trust" in refused(capsys, "resume", "tuned")
    main(["resume", "tuned", "--trust"])


@pytest.mark.parametrize(
    ("options", "kinds"),
    [([], ("action",)), (["--predicted-tokens", "action", "return"], ("return", "action"))],
)
def test_kinds_of_predicted_tokens(data, options, kinds):
    main(["pretrain", "--dataset", data, "--updates", "1", "--run", "kinds", *TINY, *options])
    assert MaskedPretraining.load("kinds/checkpoint.zip", device="cpu").predicted_tokens == kinds


def test_incompatible_weights_are_rejected_and_no_folder_is_created(pretraining, data, capsys):
    options = ["--pretrained", str(pretraining), "--run", "tuned"]
    wider = refused(capsys, "train", "dt", "--dataset", data, *TINY, *options, "--core.width", "16")
    assert "core has width=8, the agent's has width=16" in wider
    assert "layers" in refused(capsys, "train", "gtrxl", *TASK, *TINY_ONLINE, *options)
    assert "no run folder" in refused(
        capsys, "train", "dt", "--dataset", data, *TINY, "--pretrained", "nowhere", "--run", "tuned"
    )
    assert not Path("tuned").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dataset", "test/missing-v0"], "dataset 'test/missing-v0' is not in"),
        (["--dataset", ID, "--updates", "0"], "updates must be at least 1, got 0"),
        (["--dataset", ID, "--predicted-tokens"], "predicted_tokens must be one or more of return, state,"),
        (
            ["--dataset", ID, "--mask-probability", "0"],
            "mask_probability must be a finite number of more than 0 and at most 1, got 0",
        ),
    ],
)
def test_errors_are_one_line_and_no_folder_is_created(data, capsys, args, message):
    assert message in refused(capsys, "pretrain", *TINY, *args)
    assert not Path("runs").exists()
