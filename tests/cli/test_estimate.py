"""Tests of ``rlxf estimate``."""

import inspect
import re
import shlex
from functools import partial
from unittest.mock import Mock

import pytest

from rlxf import estimate_return
from rlxf.cli import main
from rlxf.cli.commands.estimate import Estimate
from rlxf.off_policy_evaluation import estimate
from rlxf.off_policy_evaluation.behavior import estimate_behavior
from rlxf.training import NumericalError
from tests.cli.running import refused, train
from tests.datasets import ID, record_cartpole, record_random

TINY = shlex.split("--updates 3 --members 2 --no-progress-bar --device cpu")
TINY_OFFLINE = shlex.split(
    "--updates 2 --episodes 0 --context-length 4 --batch-size 4 --no-progress-bar"
    " --core.width 8 --core.layers 1"
)


@pytest.fixture
def offline(minari_root):
    """Folder of a Decision Transformer that was trained on random numbers with CartPole's spaces."""
    record_cartpole()
    main(["train", "dt", "--dataset", ID, "--run", "offline", *TINY_OFFLINE])
    return "offline"


@pytest.mark.parametrize("name", ["discount", "updates", "members", "deterministic", "seed", "method"])
def test_defaults_equal_those_of_the_python_api(name):
    expected = inspect.signature(estimate_return).parameters[name].default
    assert Estimate.__dataclass_fields__[name].default == expected


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_decision_transformer_is_estimated_on_its_data_for_each_target(offline, capsys):
    main(["estimate", offline, "--target-returns", "1", "2", *TINY])
    shown = capsys.readouterr().out
    assert shown.count("Last checkpoint, update 2") == 2
    assert re.search(r"target return +│ 1 ", shown)
    assert re.search(r"target return +│ 2 ", shown)
    assert "fitted Q evaluation" in shown


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "targets"), [("bc", []), ("rvs", ["--target-returns", "1"])])
def test_perceptrons_are_estimated_on_their_data(kind, targets, minari_root, capsys):
    record_cartpole()
    options = shlex.split("--updates 2 --episodes 0 --batch-size 4 --hidden-sizes 8 --no-progress-bar")
    main(["train", kind, "--dataset", ID, "--run", "run", *options])
    capsys.readouterr()
    main(["estimate", "run", *targets, *TINY])
    shown = capsys.readouterr().out
    assert "Last checkpoint, update 2" in shown
    assert ("target return" in shown) == (kind == "rvs")


def test_divergence_is_reported_in_one_line(minari_root, capsys, monkeypatch):
    record_cartpole()
    options = shlex.split("--updates 2 --episodes 0 --batch-size 4 --hidden-sizes 8 --no-progress-bar")
    main(["train", "bc", "--dataset", ID, "--run", "run", *options])
    diverged = Mock(side_effect=NumericalError("the Q functions diverged: lower the discount"))
    monkeypatch.setattr("rlxf.off_policy_evaluation.estimate_return", diverged)
    assert "the Q functions diverged: lower" in refused(capsys, "estimate", "run", *TINY)


def test_targets_of_behavior_cloning_are_refused(minari_root, capsys):
    record_cartpole()
    options = shlex.split("--updates 2 --episodes 0 --batch-size 4 --hidden-sizes 8 --no-progress-bar")
    main(["train", "bc", "--dataset", ID, "--run", "run", *options])
    message = refused(capsys, "estimate", "run", "--target-returns", "1", *TINY)
    assert "target_returns apply to return-conditioned agents only, got [1.0]" in message


def test_a_gtrxl_needs_a_dataset(minari_root, capsys):
    train("--run", "online", "--normalize-observations")
    assert "pass logged episodes, --dataset ID" in refused(capsys, "estimate", "online", *TINY)
    record_cartpole()
    message = refused(capsys, "estimate", "online", "--dataset", ID, *TINY)
    assert "the agent does not fit dataset test/small-v0: observation space" in message


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_gtrxl_is_estimated_with_the_normalization_of_its_training(minari_root, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "estimate_behavior", partial(estimate_behavior, updates=5))
    from rlxf.envs import TMaze

    env = TMaze(corridor_length=3)
    record_random((4, 4), observation_space=env.observation_space, action_space=env.action_space)
    train("--run", "online", "--normalize-observations")
    main(["estimate", "online", "--dataset", ID, "--method", "wdr", "--no-deterministic", *TINY])
    shown = capsys.readouterr()
    assert "weighted doubly robust" in shown.out
    assert "effective sample size" in shown.out
    assert "the behavior policy is unknown" in shown.err


def test_invalid_options_are_rejected_before_training(offline, capsys):
    assert "discount must be above 0" in refused(capsys, "estimate", offline, "--discount", "2")
    assert "members must be at least 2" in refused(capsys, "estimate", offline, "--members", "1")
    assert "discount=1) needs episodes" in refused(capsys, "estimate", offline, "--discount", "1")
    assert "nowhere" in refused(capsys, "estimate", "nowhere")
