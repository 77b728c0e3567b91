"""``rlxf train gtrxl``: its options, what a run leaves, what it refuses."""

import inspect
import json
import signal
import subprocess
import sys
import time
from dataclasses import fields

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import GTrXLPPO, TransformerSpec
from rlxf.agents.gtrxl.policy import POLICIES
from rlxf.attention.techniques import TECHNIQUES
from rlxf.cli.learner import Learner
from rlxf.cli.program import parse
from rlxf.training import schedule_to_json
from tests.cli.running import TASK, TINY, refused, train

SETTABLE = {f.name for f in fields(Learner)}


# What the options are


@pytest.mark.parametrize("name", sorted(SETTABLE))
def test_an_option_has_the_agents_name_and_default(name):
    default = inspect.signature(GTrXLPPO).parameters[name].default
    assert schedule_or_self(Learner().arguments()[name]) == schedule_or_self(default)


def schedule_or_self(value):
    return schedule_to_json(value) if callable(value) else value


def test_no_setting_of_the_agent_is_forgotten():
    elsewhere = {"policy", "env", "seed", "core", "memory_length"}
    for_python = {"stats_window_size", "tensorboard_log", "policy_kwargs", "verbose", "_init_setup_model"}
    assert set(inspect.signature(GTrXLPPO).parameters) == SETTABLE | elsewhere | for_python


@pytest.mark.parametrize("name", [*POLICIES])
def test_every_policy_can_be_named(name):
    assert parse(["train", "gtrxl", "--env", "x", "--policy", name]).policy == name


# What a run leaves


def test_the_folder_of_a_run_is_whole(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"config.json", "checkpoint.zip", "progress.csv"} <= names
    assert any("tfevents" in name for name in names)


def test_the_configuration_tells_what_was_trained(finished):
    config = json.loads((finished / "config.json").read_text())
    assert config["agent"] == "gtrxl"
    assert config["env_kwargs"] == {"corridor_length": 3}
    assert config["previous_reward"] is False
    assert config["previous_action"] is True
    assert config["n_steps"] == 16
    assert config["policy"] == "MlpGTrXLPolicy"
    spec = TransformerSpec.from_dict(config["core"])
    assert GTrXLPPO.load(finished / "checkpoint.zip").core == spec
    assert spec.position == TECHNIQUES["position"]["RoPE"]()


def test_tensorboard_has_training_evaluation_and_hyperparameters(finished):
    events = EventAccumulator(str(finished)).Reload()
    tags = {
        "rollout/ep_rew_mean",
        "time/fps",
        "train/loss",
        "eval/mean_reward",
        "eval/iqm",
        "eval/success_rate",
    }
    assert tags <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("eval/mean_reward")] == [32, 64, 64]
    hparams = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"learning_rate" in hparams
    assert b"linear:0.001:0" in hparams


def test_the_log_is_a_table(finished):
    header, *rows = (finished / "progress.csv").read_text().splitlines()
    assert "eval/mean_reward" in header.split(",")
    assert len(rows) >= 3


def test_a_run_has_a_name_of_its_own(capsys):
    train("--seed", "7")
    assert "runs/gtrxl-rlxf-TMaze-v0-7" in capsys.readouterr().out
    assert "runs/gtrxl-rlxf-TMaze-v0-7 exists" in refused(capsys, "train", "gtrxl", *TASK, "--seed", "7")


def test_the_same_seed_trains_the_same_agent(tmp_path):
    for name in ("a", "b"):
        train("--run", name)
    assert (tmp_path / "a/checkpoint.zip").read_bytes() == (tmp_path / "b/checkpoint.zip").read_bytes()


# What goes wrong


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--env", "nope-v0"], "nope-v0"),
        (["--env", "CartPole-v1", "--core.pattern", "full"], "use pattern=Window(129)"),
        (["--env", "CartPole-v1", "--n-steps", "100"], "got 100"),
        (["--env", "CartPole-v1", "--core.memory", "none"], "needs a core with memory"),
        (["--env", "CartPole-v1", "--core.dropout", "0.1"], "dropout must be 0, got 0.1"),
        (["--env", "CartPole-v1", "--total-timesteps", "0"], "total_timesteps must be at least 1, got 0"),
        (["--env", "CartPole-v1", "--episodes", "0"], "episodes must be at least 1, got 0"),
        (["--env", "CartPole-v1", "--evaluate-every", "0"], "evaluate_every must be at least 1, got 0"),
        (["--env", "CartPole-v1", "--n-envs", "0"], "n_envs must be at least 1, got 0"),
        (["--env", "CartPole-v1", "--policy", "CnnGTrXLPolicy"], "MlpGTrXLPolicy"),
        (["--env", "CartPole-v1", "--learning-rate", "fast"], "fast"),
        (["--env", "CartPole-v1", "--env-kwargs", '{"wind": 1}'], "{'wind': 1}"),
        (["--env", "CartPole-v1", "--env-kwargs", "[1]"], "[1]"),
        (["--env", "rlxf/TMaze-v0", "--env-kwargs", '{"corridor_length": 0}'], "corridor_length"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(args, named, capsys, tmp_path):
    assert named in refused(capsys, "train", "gtrxl", *args)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_touched(capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("dear")
    assert "mine exists" in refused(capsys, "train", "gtrxl", *TASK, *TINY, "--run", "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_bug_keeps_its_traceback_and_the_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(GTrXLPPO, "train", lambda self: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        train("--run", "buggy")
    assert GTrXLPPO.load(tmp_path / "buggy/checkpoint.zip").num_timesteps == 32


@pytest.mark.faults
def test_ctrl_c_keeps_what_was_learned(tmp_path):
    command = [sys.executable, "-c", "from rlxf.cli import main; main()", "train", "gtrxl", *TASK, *TINY]
    command += ["--run", "run", "--total-timesteps", "1000000000"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        wait_for(tmp_path / "run/progress.csv", process)
        process.send_signal(signal.SIGINT)
        message = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert message == "rlxf: interrupted\n"
    assert GTrXLPPO.load(tmp_path / "run/checkpoint.zip").num_timesteps > 0


def wait_for(log, process) -> None:
    """Until the first line of numbers is in the log."""
    while not (log.exists() and log.read_text().count("\n") > 1):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
