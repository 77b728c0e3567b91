"""Tests of trust: descriptions of environments in runs and datasets are used only if they are trusted."""

import json
import sys
from pathlib import Path

import gymnasium
import pytest
from gymnasium.wrappers import ClipReward

from rlxf import DecisionTransformer, evaluate
from rlxf.cli import main
from rlxf.envs.described_env import DescribedEnv
from tests.cli.running import refused, train
from tests.datasets import ID, random_episodes, record

OFFLINE = ["--updates", "2", "--episodes", "2", "--batch-size", "4", "--no-progress-bar"]
PLAY = ["--episodes", "2", "--no-progress-bar"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Id of an environment that is registered by a module of the user."""
    (tmp_path / "my_tasks.py").write_text(
        "import gymnasium\ngymnasium.register('my/Maze-v0', entry_point='rlxf.envs.tmaze:TMaze')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_tasks:my/Maze-v0"
    gymnasium.registry.pop("my/Maze-v0", None)


def forget():
    """Remove the module and the registration, as in a new process."""
    sys.modules.pop("my_tasks", None)
    gymnasium.registry.pop("my/Maze-v0", None)


def test_modules_are_imported_from_the_command_line_or_with_trust(module, capsys):
    train("--run", "run", "--env", module, "--env-kwargs", "{}")
    forget()
    message = refused(capsys, "evaluate", "run", *PLAY)
    assert (
        "names the environment 'my_tasks:my/Maze-v0', and a module that a file names is not imported"
        in message
    )
    assert "my/Maze-v0" not in gymnasium.registry
    for trusting in (["--trust"], ["--env", module]):
        forget()
        main(["evaluate", "run", *PLAY, *trusting])
        assert "Evaluation over 2 episodes" in capsys.readouterr().out


def test_trust_option_of_configurations(module, capsys):
    from rlxf.cli.env_options import trust_option

    assert trust_option({"env": module, "env_kwargs": {}}) == " --trust"
    assert trust_option({"env": "CartPole-v1", "trust_data": True}) == " --trust"
    assert trust_option({"env": "rlxf/TMaze-v0", "env_kwargs": {"corridor_length": 3}}) == ""
    assert trust_option({"agent": "pretraining"}) == ""


def recorded(env):
    """Record random numbers with the environment in the metadata; return the id of the dataset."""
    episodes = random_episodes((9, 12), env.observation_space, env.action_space)
    record(episodes, ID, env.observation_space, env.action_space, env=env)
    return ID


def test_wrappers_of_datasets_are_used_with_trust(minari_root, capsys):
    data = recorded(ClipReward(gymnasium.make("rlxf/TMaze-v0", corridor_length=3), 0.5, 0.5))
    command = ["train", "dt", "--dataset", data, "--core.layers", "1", *OFFLINE]
    assert "wrapper ClipReward, which is not used without trust" in refused(capsys, *command)
    assert not Path("runs").exists()
    main([*command, "--trust-data", "--run", "trusted"])
    assert json.loads(Path("trusted/config.json").read_text())["trust_data"] is True
    assert "2 " in capsys.readouterr().out
    assert "was trained with --trust-data" in refused(capsys, "resume", "trusted")


@pytest.mark.thorough
def test_named_environments_ignore_untrusted_descriptions(minari_root, capsys):
    data = recorded(ClipReward(gymnasium.make("rlxf/TMaze-v0", corridor_length=3), 0.5, 0.5))
    main(["train", "dt", "--dataset", data, "--run", "named", "--env", "rlxf/TMaze-v0", *OFFLINE])
    assert (
        "the data specify wrapper ClipReward for rlxf/TMaze-v0; these are ignored" in capsys.readouterr().err
    )


def test_trust_in_python(minari_root):
    data = recorded(ClipReward(gymnasium.make("rlxf/TMaze-v0", corridor_length=3), 0.5, 0.5))
    agent = DecisionTransformer(data, device="cpu")
    with pytest.raises(ValueError, match="wrapper ClipReward, which is not used without trust"):
        evaluate(agent, episodes=2)
    agent.save("agent.zip")
    trusting = DecisionTransformer.load("agent.zip", data, device="cpu", trust=True)
    report = evaluate(trusting, episodes=2, target_returns=[2.0]).reports[2.0]
    assert report.mean == pytest.approx(0.5 * 4)
    assert not DecisionTransformer.load("agent.zip", data, device="cpu").trust


def test_modules_of_descriptions_are_imported_with_trust(module):
    forget()
    described = DescribedEnv(module, {"corridor_length": 3})
    with pytest.raises(ValueError, match="a module that a file names is not imported"):
        described.local_spec()
    assert "my_tasks" not in sys.modules
    spec = described.trusted_spec()
    assert (spec.id, spec.kwargs) == ("my/Maze-v0", {"corridor_length": 3})
