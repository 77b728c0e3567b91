"""Tests of ``rlxf evaluate``."""

import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from rich.progress import Progress
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

from rlxf import DecisionTransformer, GTrXLPPO, evaluate
from rlxf.cli import main
from rlxf.cli.commands.evaluate import Evaluate
from rlxf.collection import collect
from rlxf.envs import TMazeVector, make_vec_env
from tests.cli.running import refused, train
from tests.datasets import ID, random_episodes, record, record_cartpole, record_random


def test_default_seed_equals_that_of_the_python_api():
    assert (
        Evaluate.__dataclass_fields__["seed"].default
        == inspect.signature(evaluate).parameters["seed"].default
    )


def test_a_run_is_evaluated_in_its_environment(finished, capsys):
    main(["evaluate", str(finished), "--episodes", "5", "--no-progress-bar"])
    shown = capsys.readouterr().out
    assert "Evaluation over 5 episodes" in shown
    assert re.search(r"mean episode length +│ 4 ", shown)
    (event,) = EventAccumulator(str(finished)).Reload().Scalars("evaluation/mean_reward")
    assert event.step == 64


@pytest.mark.parametrize(
    ("args", "length"),
    [(["--env-kwargs", '{"corridor_length": 8}'], 9), (["--env", "rlxf/TMaze-v0"], 51)],
    ids=["changed", "another"],
)
def test_a_run_is_evaluated_in_another_environment(finished, capsys, args, length):
    main(["evaluate", str(finished), "--episodes", "2", "--no-progress-bar", *args])
    assert re.search(rf"mean episode length +│ {length} ", capsys.readouterr().out)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("args", [[], ["--env", "rlxf/TMazeActive-v0"]], ids=["own", "another"])
def test_observations_are_extended_as_in_training(args, capsys):
    train("--run", "with", "--previous-reward", "--no-previous-action")
    agent = GTrXLPPO.load("with/checkpoint.zip")
    assert "previous_reward" in agent.observation_space.spaces
    assert not agent.previous_action
    main(["evaluate", "with", "--episodes", "2", "--no-progress-bar", *args])
    assert "Evaluation over 2 episodes" in capsys.readouterr().out


def test_memory_is_kept_across_episodes(capsys):
    train("--run", "lasting", "--persist-memory-across-episodes", "--previous-transition")
    agent = GTrXLPPO.load("lasting/checkpoint.zip")
    assert agent.persist_memory_across_episodes
    assert "previous_done" in agent.observation_space.spaces
    main(["evaluate", "lasting", "--episodes", "4", "--n-envs", "2", "--no-progress-bar"])
    assert "Evaluation over 4 episodes" in capsys.readouterr().out


def test_runs_without_newer_options_are_evaluated(finished, tmp_path):
    config = json.loads((finished / "config.json").read_text())
    del config["previous_reward"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(finished / "checkpoint.zip", tmp_path)
    main(["evaluate", str(tmp_path), "--episodes", "2", "--no-progress-bar"])


def test_folders_without_a_run_are_rejected(capsys, tmp_path):
    assert "nowhere" in refused(capsys, "evaluate", "nowhere")
    assert "config.json" in refused(capsys, "evaluate", str(tmp_path))


TINY_OFFLINE = shlex.split(
    "--updates 3 --episodes 2 --context-length 4 --batch-size 4 --no-progress-bar"
    " --core.width 8 --core.layers 1"
)


@pytest.fixture
def offline(minari_root, capsys):
    """Folder of a run of a Decision Transformer with a best checkpoint."""
    record_cartpole()
    main(["train", "dt", "--dataset", ID, "--run", "offline", "--evaluate-every", "2", *TINY_OFFLINE])
    capsys.readouterr()
    return "offline"


def test_last_and_best_checkpoint_are_reported_separately(offline, capsys):
    main(["evaluate", offline, "--episodes", "3", "--no-progress-bar"])
    shown = capsys.readouterr().out
    assert "Last checkpoint, update 3" in shown
    assert "Best checkpoint, update 2, selected on other episodes" in " ".join(shown.split())
    events = EventAccumulator(offline).Reload()
    for group, step in (("evaluation", 3), ("evaluation_best", 2)):
        assert [event.step for event in events.Scalars(f"{group}/mean_reward")] == [step]


@pytest.mark.thorough
def test_evaluation_in_another_version_warns_once(offline, capsys):
    args = ["evaluate", offline, "--episodes", "2", "--no-progress-bar"]
    main([*args, "--env", "CartPole-v0"])
    assert capsys.readouterr().err.count("but the agent acts in CartPole-v0, another version") == 1
    main([*args, "--env", "CartPole-v1"])
    assert "another version" not in capsys.readouterr().err


def test_equal_checkpoints_have_one_table(finished, capsys, tmp_path):
    shutil.copytree(finished, tmp_path / "equal")
    shutil.copy(finished / "checkpoint.zip", tmp_path / "equal/best.zip")
    main(["evaluate", "equal", "--episodes", "3", "--no-progress-bar"])
    shown = capsys.readouterr().out
    assert shown.count("Evaluation over 3 episodes") == 1
    assert "acts like the last one" in shown
    assert EventAccumulator("equal").Reload().Scalars("evaluation_best/mean_reward")


@pytest.mark.parametrize(("changed", "tables"), [("value_net.mean", 1), ("action_net.bias", 2)])
def test_checkpoints_that_differ_in_values_only_have_one_table(finished, capsys, tmp_path, changed, tables):
    """The last update of a schedule that ends at 0 changes the statistics of the value head alone."""
    shutil.copytree(finished, tmp_path / "alike")
    agent = GTrXLPPO.load(finished / "checkpoint.zip", device="cpu")
    agent.num_timesteps += 1
    with torch.no_grad():
        agent.policy.state_dict()[changed] += 1
    agent.save(tmp_path / "alike/best.zip")
    main(["evaluate", "alike", "--episodes", "3", "--no-progress-bar"])
    assert capsys.readouterr().out.count("Evaluation over 3 episodes") == tables


@pytest.fixture
def labels(monkeypatch):
    """Labels of the progress bars of evaluations."""
    shown, add_task = [], Progress.add_task
    monkeypatch.setattr(
        Progress, "add_task", lambda bar, label, **more: shown.append(label) or add_task(bar, label, **more)
    )
    return shown


def test_equal_checkpoints_are_evaluated_once_at_the_end_of_a_run(minari_root, labels, capsys):
    record_cartpole()
    main(["train", "dt", "--dataset", ID, "--run", "equal", "--evaluate-every", "3", *TINY_OFFLINE])
    assert "acts like the last one" in capsys.readouterr().out
    evaluations = [label for label in labels if label.startswith("evaluate")]
    assert len(evaluations) == 2, "one evaluation during the training, and one at its end"
    assert EventAccumulator("equal").Reload().Scalars("evaluation_best/mean_reward")


@pytest.mark.thorough
def test_progress_bars_name_run_checkpoint_and_target_return(offline, labels):
    main(["evaluate", offline, "--episodes", "2", "--target-returns", "9", "3.5"])
    targets = ("target return 9", "target return 3.5")
    assert labels == [f"offline, {name}, {target}" for name in ("last", "best") for target in targets]


@pytest.mark.thorough
def test_ctrl_c_ends_an_evaluation_with_one_line(finished, tmp_path):
    code = (
        "import os, signal\nfrom rlxf.cli import main\nfrom rlxf.envs import TMazeVector\n"
        "observe = TMazeVector._observe\n"
        "def interrupt(mazes):\n    mazes._time == 2 and os.kill(os.getpid(), signal.SIGINT)\n"
        "    return observe(mazes)\n"
        f"TMazeVector._observe = interrupt\nmain(['evaluate', {str(finished)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "rlxf: interrupted\n")


@pytest.mark.thorough
def test_several_target_returns_are_evaluated(offline, capsys, tmp_path):
    args = ["--target-returns", "1", "0", "2", "--episodes", "2", "--no-progress-bar"]
    main(["evaluate", offline, *args])
    assert capsys.readouterr().out.count("Spearman") == 2
    assert (tmp_path / offline / "evaluation/targets.png").stat().st_size > 1000
    events = EventAccumulator(offline).Reload()
    assert {"evaluation/target_1/return_mean", "evaluation/target_0/return_mean"} <= set(
        events.Tags()["scalars"]
    )
    assert "evaluation/targets" in events.Tags()["images"]


def test_an_evaluation_is_part_of_the_run_and_replaces_the_last_one(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for episodes in ("2", "3"):
        main(["evaluate", "run", "--episodes", episodes, "--no-progress-bar", "--checkpoint", "last"])
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload().Runs()
    assert list(runs) == ["run"]
    events = EventAccumulator("run").Reload()
    assert len(events.Scalars("evaluation/mean_reward")) == 1
    new = {tag for tag in events.Tags()["scalars"] if tag.startswith("evaluation/")}
    assert {tag.partition("/")[2] for tag in new} >= {"mean_reward", "ci_low", "ci_high", "iqm"}


def test_a_resumed_training_keeps_later_evaluations(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    main(["evaluate", "run", "--episodes", "2", "--no-progress-bar", "--checkpoint", "last"])
    main(["resume", "run", "--total-timesteps", "96", "--quiet"])
    events = EventAccumulator("run").Reload()
    assert [event.step for event in events.Scalars("evaluation/mean_reward")] == [64]
    assert events.Scalars("train/loss")[-1].step == 96


def test_wrappers_of_the_environment_are_read_from_the_data(minari_root, capsys):
    env = gymnasium.wrappers.FlattenObservation(gymnasium.make("CartPole-v1"))
    episodes = random_episodes((5, 6), spaces.Box(-0.4, 0.4, (4,), np.float32), env.action_space)
    record(episodes, ID, env.observation_space, env.action_space, env=env)
    untrusted = refused(capsys, "train", "dt", "--dataset", ID, "--run", "wrapped", *TINY_OFFLINE)
    assert "'CartPole-v1' with wrapper FlattenObservation, which is not used without trust" in untrusted
    main(["train", "dt", "--dataset", ID, "--run", "wrapped", "--trust-data", *TINY_OFFLINE])
    assert DecisionTransformer.load("wrapped/checkpoint.zip").dataset_info.env_wrappers == (
        "FlattenObservation",
    )
    again = ["evaluate", "wrapped", "--episodes", "2", "--no-progress-bar"]
    assert "wrapper FlattenObservation" in refused(capsys, *again)
    main([*again, "--trust"])
    assert "Last checkpoint, update 3" in capsys.readouterr().out


@pytest.mark.thorough
def test_targets_outside_the_data_emit_one_warning(offline, capsys, minari_root):
    options = ["--target-returns", "300", "1", "--episodes", "2", "--no-progress-bar"]
    for words in (["evaluate", offline], ["collect", offline, "--dataset", "test/new-v0"]):
        main([*words, *options])
        warning = capsys.readouterr().err
        assert warning.startswith(
            "rlxf: warning: target returns 300 are outside the range of returns in the data"
        )
        assert warning.count("300") == 1


@pytest.mark.thorough
def test_a_decision_transformer_uses_a_datastore(offline, capsys, tmp_path):
    head = json.dumps({"name": "KNNLM", "k": 3, "weight": 0.5})
    for args in (["--head", head], ["--head", "spalm"], []):
        words = ["evaluate", offline, "--datastore", *2 * [ID], "--episodes", "2", "--no-progress-bar"]
        main([*words, *args])
        shown = " ".join(capsys.readouterr().out.split())
        assert "Last checkpoint, update 3, with a datastore of trajectories" in shown
    events = EventAccumulator(offline).Reload()
    for group in ("evaluation_datastore", "evaluation_best_datastore"):
        assert len(events.Scalars(f"{group}/mean_reward")) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--datastore", ID, "--head", "oracle"], "unknown head 'oracle'; choose one of KNNLM, SPALM"),
        (["--datastore", ID, "--head", '{"name": "KNNLM", "weight": 2}'], "must be from 0 to 1, got 2"),
        (
            ["--datastore", ID, "--head", '{"name": "KNNLM", "k": 26}'],
            "k=26 neighbors, but the data have only 25",
        ),
        (["--datastore", ID, "--head", '{"name": "KNNLM", "n": 1}'], "unexpected keyword argument 'n'"),
        (["--datastore", ID, "--head", "{"], "{ is not valid JSON"),
        (["--datastore", "test/none-v0"], "test/none-v0"),
        (
            ["--datastore", "test/other-v0"],
            "test/other-v0 cannot be a datastore of this agent: observation space",
        ),
        (["--head", "spalm"], "pass them with --datastore"),
        (["--target-returns", "nan"], "finite numbers without duplicates, got [nan]"),
        (["--target-returns", "1", "1"], "finite numbers without duplicates, got [1.0, 1.0]"),
    ],
)
def test_errors_of_targets_and_datastores(args, message, offline, capsys):
    record_random(dataset_id="test/other-v0")
    assert message in refused(capsys, "evaluate", offline, *args)


@pytest.mark.parametrize("options", [[], ["--normalize-observations"]], ids=["raw", "normalized"])
def test_a_gtrxl_uses_a_datastore(options, minari_root, capsys):
    train("--run", "maze", *options)
    collect(None, make_vec_env("rlxf/TMaze-v0", 2, env_kwargs={"corridor_length": 3}), ID, episodes=4)
    capsys.readouterr()
    for head in ('{"name": "KNNLM", "k": 3}', '{"name": "SPALM", "k": 3}'):
        main(["evaluate", "maze", "--datastore", ID, "--head", head, "--episodes", "2", "--no-progress-bar"])
        assert "Evaluation over 2 episodes" in capsys.readouterr().out
    assert EventAccumulator("maze").Reload().Scalars("evaluation_datastore/mean_reward")


def test_datastores_with_other_spaces_are_rejected(finished, minari_root, capsys):
    record_cartpole()
    message = refused(capsys, "evaluate", str(finished), "--datastore", ID)
    assert f"{ID} cannot be a datastore of this agent: observation space" in message


def test_unknown_arguments_of_the_environment_are_rejected(offline, capsys):
    assert "'gravity'" in refused(capsys, "evaluate", offline, "--env-kwargs", '{"gravity": 1}')


def test_target_returns_are_rejected_for_other_agents(finished, capsys):
    message = refused(capsys, "evaluate", str(finished), "--target-returns", "1")
    assert "target_returns apply to return-conditioned agents only" in message


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--episodes", "0"], "episodes must be at least 1, got 0"),
        (["--n-envs", "-1"], "--n-envs must be at least 1, got -1"),
        (["--seed", "-1"], "seed must be finite and at least 0, got -1"),
        (["--env", "nope-v0"], "nope-v0"),
        (["--env", "CartPole-v1"], "(4,)"),
        (["--env-kwargs", "[3]"], "--env-kwargs must be a JSON object, got [3]"),
    ],
)
def test_errors_are_one_line(args, message, finished, capsys):
    assert message in refused(capsys, "evaluate", str(finished), *args)


@pytest.mark.faults
def test_nan_observations_name_the_environment_and_step(finished, capsys, monkeypatch):
    observe = TMazeVector._observe
    monkeypatch.setattr(
        TMazeVector, "_observe", lambda mazes: observe(mazes) * (np.nan if mazes._time == 2 else 1)
    )
    message = refused(capsys, "evaluate", str(finished), "--no-progress-bar")
    assert "observation of environment 0 is not finite at its step 2: nan at index [0]" in message


@pytest.mark.faults
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "is a run of agent None"),
        ({"agent": "pretraining"}, "which cannot act: use its weights with rlxf train --pretrained"),
        (
            {"agent": "gtrxl"},
            "env in config.json must be a Gymnasium id, got None: correct it, or pass --env",
        ),
        ({"agent": "gtrxl", "env": 3}, "env in config.json must be a Gymnasium id, got 3"),
        ({"agent": "gtrxl", "env": "rlxf/TMaze-v0", "env_kwargs": 3}, "must be a JSON object, got 3"),
    ],
    ids=str,
)
def test_incomplete_configurations_are_rejected(config, message, finished, capsys, tmp_path):
    shutil.copytree(finished, tmp_path / "altered")
    (tmp_path / "altered/config.json").write_text(json.dumps(config))
    assert message in refused(capsys, "evaluate", str(tmp_path / "altered"))


@pytest.mark.faults
def test_truncated_checkpoints_are_rejected(finished, capsys, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((finished / "config.json").read_bytes())
    (broken / "checkpoint.zip").write_bytes((finished / "checkpoint.zip").read_bytes()[:-100])
    assert "checkpoint.zip" in refused(capsys, "evaluate", str(broken))
