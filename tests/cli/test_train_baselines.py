"""Tests of ``rlxf train bc`` and ``rlxf train rvs``: files of a run, evaluation, resumption and errors."""

import inspect
import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from rlxf import BehaviorCloning, ReturnConditionedMLP
from rlxf.agents.decision_transformer import Imitation
from rlxf.cli import main
from rlxf.cli.commands.train_baselines import MLPOptions
from rlxf.cli.entry_point import parse
from rlxf.data import UniformSteps
from rlxf.training import RunFolder
from tests.cli.running import refused
from tests.datasets import ID, record_cartpole

TINY = shlex.split(
    "--updates 4 --log-interval 2 --episodes 3 --batch-size 4 --hidden-sizes 8 8 --no-progress-bar"
    " --evaluate-every 2 --evaluation-episodes 2 --device cpu"
)
KINDS = {"bc": BehaviorCloning, "rvs": ReturnConditionedMLP}


@pytest.fixture
def data(minari_root):
    """Id of a dataset of random numbers that names CartPole-v1 as its environment."""
    record_cartpole((9, 3, 12, 1, 2, 5, 4, 8, 3, 2, 6))
    return ID


@pytest.mark.parametrize("kind", KINDS)
def test_options_have_the_defaults_of_the_agent(kind):
    arguments = parse(["train", kind, "--dataset", "x"]).learner.arguments()
    defaults = {name: each.default for name, each in inspect.signature(KINDS[kind]).parameters.items()}
    choices = {"objective": Imitation(), "sampling": UniformSteps()}
    expected = {field.name: defaults[field.name] for field in fields(MLPOptions)} | choices
    assert arguments == expected


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_run_that_is_evaluated_again(kind, data, capsys):
    main(["train", kind, "--dataset", data, "--run", "run", *TINY])
    config = json.loads(Path("run/config.json").read_text())
    agent = KINDS[kind].load("run/checkpoint.zip", device="cpu")
    assert (config["env"], config["hidden_sizes"]) == ("CartPole-v1", [8, 8])
    assert "core" not in config
    assert (agent.num_timesteps, agent.hidden_sizes) == (4, (8, 8))
    assert Path("run/best.zip").is_file()
    assert "Last checkpoint, update 4" in capsys.readouterr().out
    main(["evaluate", "run", "--episodes", "2", "--no-progress-bar"])
    assert "mean return" in capsys.readouterr().out
    main(["collect", "run", "--dataset", f"test/{kind}-v0", "--episodes", "2", "--no-progress-bar"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_bitwise_equal(kind, data):
    options = ["train", kind, "--dataset", data, *TINY, "--checkpoint-seconds", "0", "--dropout", "0.2"]
    main([*options, "--run", "whole"])
    main([*options, "--run", "cut"])
    run = RunFolder.reopen("cut")
    *_, last = sorted(run.resume_checkpoints.files())
    last.unlink()  # the newest checkpoint is then an earlier one
    for name in ("complete.json", "checkpoint.zip"):
        Path("cut", name).unlink(missing_ok=True)
    main(["resume", "cut", "--no-progress-bar"])
    whole, resumed = (KINDS[kind].load(f"{name}/checkpoint.zip", device="cpu") for name in ("whole", "cut"))
    assert resumed.num_timesteps == whole.num_timesteps == 4
    weights, others = (agent.policy.state_dict() for agent in (whole, resumed))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_errors_are_one_line(data, capsys):
    train = ["train", "bc", "--dataset", data, *TINY]
    assert "best must be a finite number of more than 0 and at most 1" in refused(
        capsys, *train, "--best", "2"
    )
    assert "hidden_sizes must be at least 1, got 0" in refused(capsys, *train, "--hidden-sizes", "0")
    main([*train, "--run", "run", "--best", "0.2"])
    assert "target_returns apply to return-conditioned agents only" in refused(
        capsys, "evaluate", "run", "--target-returns", "1"
    )
    assert "supported agents are gtrxl, decision_transformer" in refused(capsys, "distill", "run")
    assert "--datastore needs an agent with a transformer" in refused(
        capsys, "evaluate", "run", "--datastore", data, "--no-progress-bar"
    )
    record_cartpole((2,) * 9, "test/few-v0")
    few = ["train", "bc", "--dataset", "test/few-v0", *TINY, "--best", "0.1"]
    assert "needs at least 10 episodes, got 9" in refused(capsys, *few)


def test_settings_that_need_much_memory_are_rejected(data, capsys):
    main(["train", "bc", "--dataset", data, *TINY, "--run", "run"])
    path = Path("run/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_sizes": [10**7, 10**7]}))
    assert "needs too much memory" in refused(capsys, "resume", "run")


@pytest.mark.parametrize("episodes", [11, 4])
def test_a_decision_transformer_is_compared_with_baselines(episodes, minari_root, capsys):
    record_cartpole((9, 3, 12, 1, 2, 5, 4, 8, 3, 2, 6)[:episodes])
    sizes = shlex.split("--updates 2 --episodes 3 --batch-size 4 --context-length 2 --core.layers 1")
    options = ["train", "dt", "--dataset", ID, *sizes, "--core.width", "8", "--no-progress-bar"]
    assert "--episodes 0" in refused(capsys, *options, "--baselines", "--episodes", "0", "--run", "none")
    main([*options, "--baselines", "--target-returns", "2", "--run", "run", "--evaluate-every", "0"])
    rows = json.loads(Path("run/baselines.json").read_text())
    best = ["BC, best 10%"] if episodes >= 10 else []
    assert list(rows) == ["data", "BC", *best, "last, target 2"]
    shown = capsys.readouterr().out
    assert "Data, behavior cloning and this agent" in shown
    assert ("BC, best 10% is left out: it needs 10 episodes, the data have 4" in shown) == (not best)
