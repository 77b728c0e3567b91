"""``rlxf train dt``: its options, what a run leaves, what it refuses."""

import inspect
import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import DecisionTransformer, TransformerSpec
from rlxf.agents.decision_transformer import Imitation
from rlxf.agents.decision_transformer.objectives import OBJECTIVES
from rlxf.cli import main
from rlxf.cli.offline_learner import OfflineLearner
from rlxf.cli.program import parse
from tests.cli.running import refused
from tests.datasets import ID, record_cartpole, record_random

SETTABLE = {field.name for field in fields(OfflineLearner)}
TINY = shlex.split(
    "--updates 4 --log-interval 2 --episodes 3 --context-length 4 --batch-size 4 --no-progress-bar"
    " --core.width 8 --core.layers 1 --core.position rope"
)


@pytest.fixture
def data(minari_root):
    """Id of random numbers that are said to come from CartPole-v1."""
    record_cartpole()
    return ID


def train(*args):
    main(["train", "dt", *TINY, *args])


@pytest.mark.parametrize("name", sorted(SETTABLE))
def test_an_option_has_the_agents_name_and_default(name):
    default = inspect.signature(DecisionTransformer).parameters[name].default
    expected = Imitation() if name == "objective" else default
    assert OfflineLearner().arguments()[name] == expected


def test_no_setting_of_the_agent_is_forgotten():
    elsewhere = {"dataset", "env", "seed", "core", "download"}
    for_python = {"tensorboard_log", "verbose", "_init_setup_model"}
    assert set(inspect.signature(DecisionTransformer).parameters) == SETTABLE | elsewhere | for_python


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_can_be_named(name):
    options = parse(["train", "dt", "--dataset", "x", "--objective", name])
    assert options.learner.arguments()["objective"] == OBJECTIVES[name]()


def test_what_a_run_leaves(data, tmp_path):
    run = tmp_path / "run"
    train("--dataset", data, "--run", str(run), "--evaluate-every", "2", "--target-returns", "-2", "2")
    config = json.loads((run / "config.json").read_text())
    agent = DecisionTransformer.load(run / "checkpoint.zip", device="cpu")
    assert (config["agent"], config["dataset"]) == ("decision_transformer", [data])
    assert (config["env"], config["target_returns"]) == ("CartPole-v1", [-2.0, 2.0])
    assert config["return_scale"] == agent.return_scale > 0
    assert TransformerSpec.from_dict(config["core"]) == agent.core
    assert agent.num_timesteps == 4
    events = EventAccumulator(str(run)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4]
    assert {event.step for event in events.Scalars("eval/target_2/return_mean")} == {2, 4}
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert (run / "progress.csv").exists()


def test_the_largest_return_of_the_data_is_asked_for_by_default(data):
    train("--dataset", data)
    run = Path("runs", "dt-test-small-v0-0")
    config = json.loads((run / "config.json").read_text())
    agent = DecisionTransformer.load(run / "checkpoint.zip", device="cpu")
    assert config["target_returns"] == [agent.return_range[1]]


def test_datasets_are_joined(data):
    record_cartpole((4,), "test/more-v0")
    train("--dataset", data, "test/more-v0", "--run", "both")
    agent = DecisionTransformer.load("both/checkpoint.zip", device="cpu")
    assert agent.facts.dataset_ids == (data, "test/more-v0")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dataset", "test/missing-v0"], "dataset 'test/missing-v0' is not in"),
        (["--dataset", "test/small-v0", "--updates", "0"], "updates must be at least 1, got 0"),
        (["--dataset", "test/small-v0", "--context-length", "0"], "context_length must be at least 1, got 0"),
        (["--dataset", "test/small-v0", "--learning-rate", "fast"], "a schedule is NUMBER"),
        (["--dataset", "test/small-v0", "--env", "Pendulum-v1"], "does not fit dataset test/small-v0"),
        (["--dataset", "test/small-v0", "--env", "Pendlum-v1"], "near names: Pendulum-v1"),
    ],
)
def test_what_is_refused_is_told_in_one_line_and_leaves_no_folder(data, capsys, args, message):
    assert message in refused(capsys, "train", "dt", *TINY, *args)
    assert not Path("runs").exists()


def test_data_that_name_no_environment(minari_root, capsys):
    record_random((3, 4))
    assert "does not say which environment" in refused(
        capsys, "train", "dt", *TINY, "--dataset", "test/small-v0"
    )


def test_a_folder_that_exists_is_left_alone(data, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    assert "exists" in refused(capsys, "train", "dt", *TINY, "--dataset", data, "--run", "run")
