"""Tests of ``rlxf baseline``: agents of Stable-Baselines3 and random actions as runs."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from rlxf.cli import main
from rlxf.cli.sb3_baselines import RandomPolicy
from rlxf.training import RunFolder
from tests.cli.running import refused

TASK = ["--env", "CartPole-v1", "--episodes", "3", "--quiet"]
PPO = [*TASK, "--total-timesteps", "64", "--evaluate-every", "32", "--evaluation-episodes", "2"]
SMALL = ["--arguments", '{"n_steps": 32, "batch_size": 32, "n_epochs": 1}']


def baseline(folder: Path, *words: str) -> dict:
    """Run a baseline, and return the report of its last evaluation."""
    main(["baseline", *words, "--run", str(folder)])
    return json.loads((folder / "evaluation.json").read_text())["last"]


@pytest.mark.parametrize(
    ("algorithm", "total", "steps"), [("ppo", "64", 64), ("ppo", "128", 64), ("random", "64", 0)]
)
def test_the_marker_says_whether_an_evaluation_ended_the_training(tmp_path, algorithm, total, steps):
    words = [] if algorithm == "random" else SMALL
    baseline(tmp_path / "run", algorithm, *PPO, *words, "--total-timesteps", total, "--stop-return", "0")
    completion = RunFolder.reopen(tmp_path / "run").completion
    assert (completion.steps, completion.ended_early) == (steps, total == "128")


@pytest.mark.parametrize("algorithm", ["ppo", "recurrent-ppo"])
def test_a_run_has_the_files_that_comparisons_read(tmp_path, algorithm):
    report = baseline(tmp_path / "run", algorithm, *PPO, *SMALL)
    assert len(report["returns"]) == 3
    assert report["mean"] == pytest.approx(np.mean(report["returns"]))
    run = RunFolder.reopen(tmp_path / "run")
    assert run.completion.steps == 64
    assert (run.config["agent"], run.config["seed"]) == (algorithm, 0)
    with open(run.path / "progress.csv") as file:
        rows = list(csv.DictReader(file))
    evaluated = [int(row["time/total_timesteps"]) for row in rows if row["eval/mean_reward"]]
    assert evaluated == [32, 64, 64]


@pytest.mark.parametrize("option", [[], ["--no-progress-bar"]])
def test_progress_is_shown_unless_it_is_turned_off(tmp_path, capsys, option):
    words = [word for word in PPO if word != "--quiet"]
    baseline(tmp_path / "run", "ppo", *words, *SMALL, *option)
    shown = capsys.readouterr().out
    assert ("steps 64/64" in shown and "evaluation at step 64" in shown) == (not option)


def test_equal_seeds_give_equal_returns(tmp_path):
    words = ["ppo", *PPO, *SMALL, "--normalize-observations", "--frame-stack", "2", "--seed"]
    seeds = {"a": "5", "b": "5", "c": "6"}
    first, second, other = (baseline(tmp_path / name, *words, seed) for name, seed in seeds.items())
    assert first["returns"] == second["returns"] != other["returns"]


def test_random_actions_are_seeded_and_cover_the_space(tmp_path):
    reports = [
        baseline(tmp_path / n, "random", *TASK, "--seed", s) for n, s in (("a", "1"), ("b", "1"), ("c", "2"))
    ]
    assert reports[0]["returns"] == reports[1]["returns"] != reports[2]["returns"]
    assert 9 <= reports[0]["mean"] <= 60


def test_random_actions_of_a_box(tmp_path):
    report = baseline(tmp_path / "run", "random", "--env", "Pendulum-v1", "--episodes", "2", "--quiet")
    assert -2000 < report["mean"] < -600


def test_a_baseline_cannot_be_resumed(tmp_path, capsys):
    baseline(tmp_path / "run", "random", *TASK)
    assert "was made by rlxf baseline, which saves no checkpoints" in refused(
        capsys, "resume", str(tmp_path / "run")
    )


@pytest.mark.parametrize("command", ["evaluate", "play"])
def test_a_baseline_has_no_agent_to_evaluate(tmp_path, capsys, command):
    baseline(tmp_path / "run", "random", *TASK)
    message = refused(capsys, command, str(tmp_path / "run"))
    assert "has no checkpoint.zip: it was made by rlxf baseline, which saves no agent" in message
    assert "Only rlxf plot, rlxf compare and rlxf experiment read it" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--arguments", '{"n_step": 3}'],
            "--arguments of PPO: unknown argument n_step; did you mean n_steps? Choose one of batch_size, ",
        ),
        (["--arguments", '{"env": "x"}'], "unknown argument env, which the command sets: remove it"),
        (["--arguments", '{"seed": 1}'], "unknown argument seed, which"),
        (["--total-timesteps", "0"], "--total-timesteps must be at least 1, got 0"),
        (["--frame-stack", "0"], "--frame-stack must be at least 1"),
        (
            ["--env", "FrozenLake-v1", "--frame-stack", "4"],
            "--frame-stack needs observations that are",
        ),
        (["--seed", "-1"], "--seed must be finite and at least 0"),
        (["--env", "CartPol-v1"], "unknown environment id 'CartPol-v1'; similar ids: CartPole-v1"),
        (
            ["--env", "FrozenLake-v1", "--normalize-observations"],
            "needs Box observations",
        ),
        (["--arguments", "[1]"], "--arguments must be a JSON object, got [1]"),
        (["--arguments", '{"_init_setup_model": false}'], "unknown argument _init_setup_model"),
        (["--arguments", '{"learning_rate": "linear:1:0"}'], "got a text for learning_rate"),
        (["--arguments", '{"gamma": null}'], "gamma in --arguments of PPO must be a number, got null"),
        (
            ["--arguments", '{"n_epochs": 1.5}'],
            "n_epochs in --arguments of PPO must be an integer of at least 1, got 1.5",
        ),
        (["--arguments", '{"n_epochs": 0}'], "must be an integer of at least 1, got 0"),
        (
            ["--arguments", '{"learning_rate": null}'],
            "learning_rate in --arguments of PPO must be a number, got",
        ),
        (
            ["--arguments", '{"target_kl": [1]}'],
            "target_kl in --arguments of PPO must be a number or null, got [1]",
        ),
        (["--arguments", '{"normalize_advantage": 2}'], "must be true or false, got 2"),
        (["--arguments", '{"n_steps": 0}'], "PPO refuses its arguments or the task: `n_steps * n_envs` must"),
    ],
)
def test_invalid_options_are_one_line(tmp_path, capsys, words, message):
    run = tmp_path / "run"
    assert message in refused(capsys, "baseline", "ppo", *TASK, *words, "--run", str(run))
    assert not run.exists()


class Broken(gymnasium.Env):
    """Environment whose steps fail."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        raise KeyError("broken")


def test_a_run_that_fails_before_the_first_update_leaves_no_folder(tmp_path):
    gymnasium.register("test/Broken-v0", Broken)
    with pytest.raises(KeyError, match="broken"):
        main(["baseline", "ppo", "--env", "test/Broken-v0", "--quiet", "--run", str(tmp_path / "run")])
    gymnasium.registry.pop("test/Broken-v0")
    assert not (tmp_path / "run").exists()


def test_box_entries_of_dict_observations_are_normalized(tmp_path):
    class Task(gymnasium.Env):
        observation_space = spaces.Dict({"a": spaces.Box(-9, 9, (2,)), "b": spaces.Discrete(2)})
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"a": np.full(2, 5, np.float32), "b": 1}, {}

        def step(self, action):
            return {"a": np.full(2, 7, np.float32), "b": 0}, 1.0, True, False, {}

    gymnasium.register("test/Dict-v0", Task)
    words = ["--env", "test/Dict-v0", "--total-timesteps", "64", "--episodes", "2", "--quiet"]
    assert baseline(tmp_path / "run", "ppo", *words, *SMALL, "--normalize-observations")["mean"] == 1
    gymnasium.registry.pop("test/Dict-v0")


def test_an_existing_folder_is_kept(tmp_path, capsys):
    (tmp_path / "precious").write_text("x")
    assert "exists; choose another folder" in refused(
        capsys, "baseline", "ppo", *TASK, "--run", str(tmp_path)
    )
    assert (tmp_path / "precious").read_text() == "x"


def test_random_actions_have_no_options_of_algorithms(tmp_path, capsys):
    words = ["--arguments", '{"n_steps": 1}', "--normalize-observations"]
    message = refused(capsys, "baseline", "random", *TASK, *words, "--run", str(tmp_path / "run"))
    assert "random actions have no --arguments, --normalize-observations; leave it out" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Tuple([spaces.Discrete(2)] * 2),
        spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)})}),
        spaces.Dict({"instruction": spaces.Text(9), "position": spaces.Box(-1, 1, (3,))}),
    ],
)
def test_random_actions_are_as_many_as_environments(space):
    env = SimpleNamespace(action_space=spaces.Discrete(3), observation_space=space)
    observations = batch_space(space, 5).sample()
    assert RandomPolicy(env, 0).predict(observations)[0].shape == (5,)


def test_weights_that_are_not_finite_are_reported_in_one_line(tmp_path, capsys):
    arguments = '{"learning_rate": 1e20, "n_steps": 64}'
    words = ["baseline", "ppo", "--env", "Pendulum-v1", "--total-timesteps", "256", "--evaluate-every", "0"]
    with pytest.raises(SystemExit) as exited:
        main([*words, "--arguments", arguments, "--quiet", "--run", str(tmp_path / "run")])
    assert exited.value.code == 2
    assert "the weights of ppo are NaN or infinite; use a smaller learning_rate" in capsys.readouterr().err
