"""Tests of commands on environments with all kinds of spaces."""

import json
import shlex

import minari
import pytest

from rlxf.cli import main
from tests.cli.running import refused
from tests.envs.small_envs import ACTIONS, OBSERVATIONS

ID = "test/spaces-v0"
ENV = "tests.envs.small_envs:rlxf-test/AnySpace-v0"
TINY = shlex.split(
    "--updates 2 --log-interval 2 --episodes 2 --context-length 4 --batch-size 4 --no-progress-bar"
    " --core.width 8 --core.layers 1"
)


@pytest.mark.filterwarnings("ignore:target returns", "ignore:observation.* is text")
@pytest.mark.parametrize(
    ("observations", "actions"), [("MiniGrid's", "Discrete from 1"), ("Tuple in a Dict", "MultiBinary")]
)
def test_record_train_and_evaluate(observations, actions, minari_root, capsys):
    kwargs = json.dumps({"observations": observations, "actions": actions})
    task = ["--env", ENV, "--env-kwargs", kwargs, "--episodes", "4", "--n-envs", "2"]
    main(["collect", *task, "--dataset", ID, "--no-progress-bar"])
    dataset = minari.load_dataset(ID)
    assert dataset.observation_space == OBSERVATIONS[observations]
    assert dataset.action_space == ACTIONS[actions]
    main(["train", "dt", "--dataset", ID, "--run", "run", "--trust-data", *TINY])
    capsys.readouterr()
    main(["evaluate", "run", "--trust", "--episodes", "2", "--no-progress-bar"])
    assert "achieved" in capsys.readouterr().out


def test_error_of_unsupported_spaces_names_a_wrapper(capsys):
    assert "gymnasium.wrappers.FlattenObservation" in refused(capsys, "train", "gtrxl", "--env", ENV)


def test_unsupported_text_spaces_are_rejected(capsys, minari_root):
    kwargs = json.dumps({"observations": "other words"})
    message = refused(capsys, "collect", "--env", ENV, "--env-kwargs", kwargs, "--dataset", ID)
    assert "Minari does not support" in message
    assert list(minari_root.iterdir()) == []
