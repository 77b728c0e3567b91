"""Tests of ``rlxf train gtrxl``: options, files of a run, and errors."""

import inspect
import json
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import partial

import gymnasium
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import GTrXLPPO, TransformerSpec
from rlxf.agents.gtrxl.policies import POLICIES, SB3_POLICIES
from rlxf.agents.gtrxl.rollout_collector import RolloutCollector
from rlxf.attention.registry import TECHNIQUES
from rlxf.cli import main
from rlxf.cli.commands.train_gtrxl import PPOOptions
from rlxf.cli.entry_point import parse
from rlxf.cli.env_options import EnvOptions
from rlxf.envs import make_vec_env
from rlxf.training import load_normalizer, schedule_to_json
from tests.cli.running import TASK, TINY, refused, train

SETTABLE = {f.name for f in fields(PPOOptions)}


# Options


@pytest.mark.parametrize("name", sorted(SETTABLE))
def test_options_have_the_names_and_defaults_of_the_agent(name):
    default = inspect.signature(GTrXLPPO).parameters[name].default
    assert schedule_or_self(PPOOptions().arguments()[name]) == schedule_or_self(default)


def schedule_or_self(value):
    return schedule_to_json(value) if callable(value) else value


def test_every_parameter_of_the_agent_is_an_option():
    other_options = {"policy", "env", "seed", "core", "memory_length"}
    python_only = {"stats_window_size", "tensorboard_log", "policy_kwargs", "verbose", "_init_setup_model"}
    assert set(inspect.signature(GTrXLPPO).parameters) == SETTABLE | other_options | python_only


def test_help_contains_the_syntax_of_schedules(capsys):
    with pytest.raises(SystemExit):
        main(["train", "gtrxl", "--help"])
    assert "linear:START:END[:FRACTION]" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*POLICIES, *SB3_POLICIES])
def test_every_policy_can_be_chosen(name):
    assert parse(["train", "gtrxl", "--env", "x", "--policy", name]).policy == name


def test_policies_can_have_the_names_of_stable_baselines3(tmp_path):
    train("--policy", "MlpPolicy", "--run", "run")
    assert json.loads((tmp_path / "run/config.json").read_text())["policy"] == "MlpGTrXLPolicy"


# Files of a run


def test_files_of_a_run(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"config.json", "checkpoint.zip", "progress.csv"} <= names
    assert any("tfevents" in name for name in names)


def test_configuration_of_a_run(finished):
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


def test_the_log_is_a_csv_table(finished):
    header, *rows = (finished / "progress.csv").read_text().splitlines()
    assert "eval/mean_reward" in header.split(",")
    assert len(rows) >= 3


def test_default_folder_of_a_run(capsys):
    train("--seed", "7")
    assert "runs/gtrxl-rlxf-TMaze-v0-7" in capsys.readouterr().out
    assert "runs/gtrxl-rlxf-TMaze-v0-7 exists" in refused(capsys, "train", "gtrxl", *TASK, "--seed", "7")


def test_equal_seeds_train_equal_agents(tmp_path):
    for name in ("a", "b"):
        train("--run", name)
    assert (tmp_path / "a/checkpoint.zip").read_bytes() == (tmp_path / "b/checkpoint.zip").read_bytes()


# Errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--env", "nope-v0"], "nope-v0"),
        (["--env", "CartPole-v1", "--n-steps", "100"], "got 100"),
        (["--env", "CartPole-v1", "--core.memory", "none"], "needs a core with memory"),
        (["--env", "CartPole-v1", "--core.dropout", "0.1"], "dropout must be 0, got 0.1"),
        (["--env", "CartPole-v1", "--total-timesteps", "0"], "--total-timesteps must be at least 1, got 0"),
        (["--env", "CartPole-v1", "--episodes", "0"], "episodes must be at least 1, got 0"),
        (
            ["--env", "CartPole-v1", "--evaluate-every", "-1"],
            "--evaluate-every must be finite and at least 0",
        ),
        (["--env", "CartPole-v1", "--evaluation-episodes", "0"], "--evaluation-episodes must be at least 1"),
        (["--env", "CartPole-v1", "--n-envs", "0"], "--n-envs must be at least 1, got 0"),
        (["--env", "CartPole-v1", "--policy", "CnnGTrXLPolicy"], "MlpGTrXLPolicy"),
        (["--env", "CartPole-v1", "--policy", "MlpGTrXLPolic"], "did you mean MlpGTrXLPolicy?"),
        (["--env", "CartPole-v1", "--learning-rate", "fast"], "fast"),
        (["--env", "CartPole-v1", "--env-kwargs", '{"wind": 1}'], "takes no argument 'wind'; it takes "),
        (["--env", "CartPole-v1", "--env-kwargs", "[1]"], "[1]"),
        (["--env", "rlxf/TMaze-v0", "--env-kwargs", '{"corridor_length": 0}'], "corridor_length"),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else "",
)
def test_errors_are_one_line_and_no_folder_is_created(args, message, capsys, tmp_path):
    assert message in refused(capsys, "train", "gtrxl", *args)
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_are_not_changed(capsys, tmp_path):
    (tmp_path / "existing").mkdir()
    (tmp_path / "existing/notes.txt").write_text("text")
    assert "existing exists" in refused(capsys, "train", "gtrxl", *TASK, *TINY, "--run", "existing")
    assert [path.name for path in (tmp_path / "existing").iterdir()] == ["notes.txt"]


def test_a_bug_keeps_its_traceback_and_the_progress_is_saved(monkeypatch, tmp_path):
    learn, calls = GTrXLPPO.train, []

    def breaks(self):
        calls.append(self)
        return learn(self) if len(calls) == 1 else int("no number")

    monkeypatch.setattr(GTrXLPPO, "train", breaks)
    with pytest.raises(ValueError, match="no number"):
        train("--run", "buggy")
    assert GTrXLPPO.load(tmp_path / "buggy/checkpoint.zip").num_timesteps == 64


class Poisoned(gymnasium.Env):
    """Environment with reward 1 at each step, and NaN at one step."""

    observation_space = gymnasium.spaces.Box(0, 99, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, step):
        self.left = step

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.full(2, 30.0, np.float32), np.nan if self.left == 0 else 1.0, False, False, {}


class Image(Poisoned):
    """Environment with image observations."""

    observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 3), np.uint8)

    def __init__(self):
        super().__init__(step=0)


@pytest.fixture
def poisoned(monkeypatch):
    """Register both environments, and return a function that makes the arguments for `Poisoned`."""
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("tests/Poisoned-v0", Poisoned)
    gymnasium.register("tests/Image-v0", Image)
    return lambda step: ["--env", "tests/Poisoned-v0", "--env-kwargs", json.dumps({"step": step}), *TINY]


def test_failure_in_the_first_rollout_removes_the_folder(poisoned, capsys, tmp_path):
    message = refused(capsys, "train", "gtrxl", *poisoned(7), "--run", "failed")
    assert "reward of environment 0 is not finite at its step 7: nan" in message
    assert list(tmp_path.iterdir()) == []


def test_failure_in_a_later_rollout_saves_the_progress(poisoned, capsys, tmp_path):
    assert "at its step 20" in refused(capsys, "train", "gtrxl", *poisoned(20), "--run", "failed")
    assert GTrXLPPO.load(tmp_path / "failed/checkpoint.zip").num_timesteps == 40


def test_every_environment_is_closed(monkeypatch):
    made, closed = [], []
    make = EnvOptions.make

    def watched(self, *args):
        env = make(self, *args)
        made.append(env)
        env.close = lambda: closed.append(env)
        return env

    monkeypatch.setattr(EnvOptions, "make", watched)
    train("--evaluate-every", "32")
    assert len(made) == 3, "training, evaluations during the training, and final evaluation"
    assert closed == made[1:] + made[:1]


# Normalized observations


@pytest.fixture(scope="module")
def normalized(tmp_path_factory):
    """Folder of a run on CartPole with normalized observations."""
    path = tmp_path_factory.mktemp("run") / "normalized"
    cartpole = ["--env", "CartPole-v1", *TINY, "--normalize-observations", "--evaluate-every", "32"]
    main(["train", "gtrxl", *cartpole, "--run", str(path)])
    return path


def test_normalization_statistics_are_saved_without_pickle(normalized):
    env = load_normalizer(normalized / "normalizer.zip", make_vec_env("CartPole-v1", 1))
    assert env.obs_rms.count == pytest.approx(64, abs=3)  # all steps, the first observations, SB3's 1e-4
    assert (env.obs_rms.var > 0).all()
    assert not env.norm_reward
    assert json.loads((normalized / "config.json").read_text())["normalize_observations"] is True


def test_evaluation_normalizes_observations_as_in_training(normalized, monkeypatch):
    seen = []
    predict = GTrXLPPO.predict

    def watched(self, observation, *args, **kwargs):
        seen.append(observation.copy())
        return predict(self, observation, *args, **kwargs)

    monkeypatch.setattr(GTrXLPPO, "predict", watched)
    main(["evaluate", str(normalized), "--episodes", "2", "--no-progress-bar"])
    raw = make_vec_env("CartPole-v1", 2)
    raw.seed(1_000_000)
    env = load_normalizer(normalized / "normalizer.zip", raw)
    env.training = False
    np.testing.assert_array_equal(seen[0], env.reset())


def test_normalized_runs_reject_other_observation_spaces(normalized, capsys):
    assert "observation space" in refused(capsys, "evaluate", str(normalized), "--env", "Pendulum-v1")


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "tests/Image-v0"])
@pytest.mark.usefixtures("poisoned")
def test_normalization_is_rejected_for_images_and_discrete_observations(env_id, capsys, tmp_path):
    message = refused(capsys, "train", "gtrxl", "--env", env_id, "--normalize-observations")
    assert "--normalize-observations needs Box observations that are not images" in message
    assert list(tmp_path.iterdir()) == []


# Normalized rewards


class Paid(Poisoned):
    """Environment with episodes of 4 steps and a reward of 100 at each step."""

    def __init__(self):
        super().__init__(step=0)

    def step(self, action):
        self.left += 1
        return np.zeros(2, np.float32), 100.0, self.left % 4 == 0, False, {}


def test_training_normalizes_rewards_and_reports_raw_ones(monkeypatch, tmp_path):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("tests/Paid-v0", Paid)
    rewards = []
    original = RolloutCollector.store
    monkeypatch.setattr(
        RolloutCollector,
        "store",
        lambda self, step, results, gamma: (
            rewards.append(results.rewards.numpy().copy()) or original(self, step, results, gamma)
        ),
    )
    words = [
        "--env",
        "tests/Paid-v0",
        *TINY,
        "--normalize-rewards",
        "--gamma",
        "0.5",
        "--evaluate-every",
        "32",
    ]
    main(["train", "gtrxl", *words, "--run", "run"])
    assert 0 < np.max(rewards) <= 10
    events = EventAccumulator("run").Reload()
    for tag in ("eval/mean_reward", "rollout/ep_rew_mean"):
        assert {event.value for event in events.Scalars(tag)} == {400.0}
    kept = load_normalizer(tmp_path / "run/normalizer.zip", make_vec_env("tests/Paid-v0", 2))
    assert (kept.norm_obs, kept.norm_reward, kept.gamma) == (False, True, 0.5)
    assert kept.ret_rms.count == pytest.approx(64, abs=1)
    assert json.loads((tmp_path / "run/config.json").read_text())["normalize_rewards"] is True
    main(["evaluate", "run", "--episodes", "2", "--no-progress-bar"])
    assert EventAccumulator("run").Reload().Scalars("evaluation/mean_reward")[-1].value == 400.0


# Interruption


@pytest.mark.faults
def test_ctrl_c_saves_the_progress(tmp_path):
    command = [sys.executable, "-c", "from rlxf.cli import main; main()", "train", "gtrxl", *TASK, *TINY]
    command += ["--run", "run", "--total-timesteps", "1000000000"]
    enable = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in background jobs of a shell
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=enable
    ) as process:
        try:
            wait_for(tmp_path / "run/progress.csv", process)
            process.send_signal(signal.SIGINT)
            message = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 75
    assert message == "rlxf: stopped by SIGINT; resume with: rlxf resume run\n"
    assert GTrXLPPO.load(tmp_path / "run/checkpoint.zip").num_timesteps > 0


def wait_for(log, process) -> None:
    """Wait until the second rollout is logged, so that the first update is done."""
    while not (log.exists() and log.read_text().count("\n") > 2):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)


def test_error_of_a_missing_gpu_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = tmp_path / "run"
    message = refused(capsys, "train", "gtrxl", *TASK, *TINY, "--device", "cuda", "--run", str(run))
    assert "device='cuda' requires a GPU that does not exist: torch finds none" in message
    assert not run.exists()
