"""Tests of the options for averaged weights, held-out episodes, sampling and auxiliary losses."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import BehaviorCloning, DecisionTransformer
from rlxf.agents.pretraining import MaskedPretraining
from rlxf.cli import main
from rlxf.cli.entry_point import parse
from rlxf.data import SAMPLINGS, ReturnWeighted
from rlxf.training import CheckpointFolder, read_archive
from rlxf.training.resumed_logger import read_rows
from tests.cli.running import refused
from tests.datasets import ID, record_cartpole

LENGTHS = (9, 3, 12, 1, 5, 7, 2, 8, 4, 6)
SHARED = "--updates 6 --log-interval 2 --batch-size 4 --no-progress-bar --seed 1"
ROBUST = "--weight-averaging 0.9 --validation-fraction 0.2 --validation-seed 3 --sampling uniform-episodes"
COMMANDS = {
    "dt": "train dt --context-length 4 --core.width 8 --core.layers 1 --episodes 2 --evaluate-every 2",
    "bc": "train bc --hidden-sizes 8 --episodes 2 --evaluate-every 2",
    "rvs": "train rvs --hidden-sizes 8 --episodes 2 --evaluate-every 2",
    "pretrain": "pretrain --context-length 4 --core.width 8 --core.layers 1",
}


@pytest.fixture
def data(minari_root, tmp_path, monkeypatch):
    """Id of a dataset of ten episodes that names CartPole-v1 as its environment."""
    record_cartpole(LENGTHS)
    monkeypatch.chdir(tmp_path)
    return ID


def train(name, *words):
    main([*shlex.split(f"{COMMANDS[name]} --dataset {ID} {SHARED} --run runs/{name}"), *words])
    return Path("runs", name)


def logged(run):
    events = EventAccumulator(str(run)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("validation/")]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_reach_the_agent_and_the_files(data, capsys, name):
    run = train(name, *shlex.split(ROBUST))
    config = json.loads((run / "config.json").read_text())
    expected = {"weight_averaging": 0.9, "validation_fraction": 0.2, "validation_seed": 3}
    assert {key: config[key] for key in expected} == expected
    settings = read_archive(run / "checkpoint.zip").documents["agent"]["settings"]
    assert {key: settings[key] for key in expected} == expected
    assert settings["sampling"] == {"name": "UniformEpisodes"}
    losses = logged(run)["validation/loss"]
    assert [*losses] == ([2, 4, 6] if name != "pretrain" else [1, 2, 3, 4, 5, 6])
    best = min(losses, key=losses.get)
    described = f"lowest validation loss during training: {losses[best]:.4g} at update {best:,}, saved in"
    assert described in " ".join(capsys.readouterr().out.split())
    assert read_archive(run / "best-validation.zip").documents["agent"]["progress"]["num_timesteps"] == best
    assert "best-validation.zip" in json.loads((run / "completed.json").read_text())["sha256"]
    rows = [row for row in read_rows(run / "progress.csv") if row.get("validation/loss")]
    assert len(rows) == len(losses)


def test_defaults_are_not_in_checkpoints(data):
    run = train("bc")
    archive = read_archive(run / "checkpoint.zip")
    names = {"weight_averaging", "validation_fraction", "validation_seed", "sampling"}
    assert not names & archive.documents["agent"]["settings"].keys()
    assert archive.tensors.keys() == {"generators", "policy", "optimizer", "window_generator"}
    assert not (run / "best-validation.zip").exists()


@pytest.mark.thorough
def test_auxiliary_losses_are_logged(data):
    run = train("dt", "--state-loss-weight", "0.5", "--return-loss-weight", "1")
    tags = EventAccumulator(str(run)).Reload().Tags()["scalars"]
    assert {"train/state_loss", "train/return_loss"} <= set(tags)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_sampling_scheme_can_be_chosen(name):
    options = parse(["train", "dt", "--dataset", "x", "--sampling", name.lower()])
    assert options.learner.arguments()["sampling"] == SAMPLINGS[name]()


def test_sampling_has_options():
    text = '{"name": "ReturnWeighted", "temperature": 0.2}'
    options = parse(["train", "bc", "--dataset", "x", "--sampling", text])
    assert options.learner.arguments()["sampling"] == ReturnWeighted(0.2)


def test_the_progress_shows_the_validation_loss(data, capsys):
    words = f"train bc --dataset {ID} --updates 3 --hidden-sizes 8 --episodes 0 --validation-fraction 0.2"
    main(shlex.split(f"{words} --run runs/shown"))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("updates 3/3"))
    losses = logged(Path("runs/shown"))["validation/loss"]
    assert [*losses] == [1, 2, 3]
    assert f"validation loss {losses[3]:.3g}" in line


def test_the_checkpoint_of_the_lowest_validation_loss_can_be_evaluated(data, capsys):
    run = train("dt", "--validation-fraction", "0.2")
    capsys.readouterr()
    words = ["--episodes", "2", "--no-progress-bar"]
    main(["evaluate", str(run), "--checkpoint", "validation", *words])
    printed = capsys.readouterr().out
    assert "Checkpoint with the lowest validation loss" in printed
    assert "Last checkpoint" not in printed
    assert EventAccumulator(str(run)).Reload().Scalars("evaluation_validation/mean_reward")
    main(["evaluate", str(run), *words])
    assert "Last checkpoint" in capsys.readouterr().out


def test_a_run_without_held_out_episodes_has_no_such_checkpoint(data, capsys):
    run = train("bc")
    message = (
        "has no best-validation.zip: it is a shared copy of one checkpoint, or was trained without "
        "--validation-fraction; evaluate the last checkpoint"
    )
    assert message in refused(capsys, "evaluate", str(run), "--checkpoint", "validation", "--episodes", "2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--weight-averaging 1", "of more than 0 and less than 1 or None, got 1"),
        ("--validation-fraction 0", "of more than 0 and less than 1 or None, got 0"),
        ("--validation-fraction 0.5 --validation-seed -1", "validation_seed must be an integer from 0 to"),
        ("--sampling uniform", "unknown sampling 'uniform'; "),
        (
            '--sampling \'{"name": "ReturnWeighted", "temperature": 0}\'',
            "temperature must be above 0",
        ),
        ('--sampling \'{"name": "UniformSteps", "a": 0}\'', "UniformSteps has no option 'a'; it has none"),
    ],
)
@pytest.mark.parametrize("name", COMMANDS)
def test_errors_are_one_line_and_no_folder_is_created(data, capsys, name, words, message):
    line = f"{COMMANDS[name]} --dataset {ID} {SHARED} --run runs/new {words}"
    assert message in refused(capsys, *shlex.split(line))
    assert not Path("runs").exists()


AGENTS = {"dt": DecisionTransformer, "bc": BehaviorCloning, "pretrain": MaskedPretraining}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", AGENTS)
def test_a_resumed_run_has_the_same_weights_and_best_checkpoint(data, name):
    whole = train(name, *shlex.split(ROBUST), "--checkpoint-seconds", "0")
    expected = {file: (whole / file).read_bytes() for file in ("checkpoint.zip", "best-validation.zip")}
    for file in (*expected, "completed.json"):
        (whole / file).unlink()
    checkpoints = CheckpointFolder(whole / "checkpoints").files()
    for file in checkpoints[1:]:
        file.unlink()
    start = read_archive(checkpoints[0]).documents["agent"]["progress"]["num_timesteps"]
    main(["resume", str(whole), "--no-progress-bar"])
    found, wanted = AGENTS[name].load(whole / "checkpoint.zip", device="cpu"), whole.parent / "wanted.zip"
    wanted.write_bytes(expected["checkpoint.zip"])
    other = AGENTS[name].load(wanted, device="cpu")
    for one, two in ((found.policy, other.policy), (found._update.trained, other._update.trained)):
        assert all(torch.equal(value, two.state_dict()[key]) for key, value in one.state_dict().items())
    losses = logged(whole)["validation/loss"]
    if min(losses, key=losses.get) > start:
        assert (whole / "best-validation.zip").read_bytes() == expected["best-validation.zip"]
