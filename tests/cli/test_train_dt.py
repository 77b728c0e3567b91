"""Tests of ``rlxf train dt``: options, files of a run, and errors."""

import errno
import inspect
import json
import re
import shlex
import time
from dataclasses import fields
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import DecisionTransformer, TransformerSpec
from rlxf.agents.decision_transformer import KZL, ODT, Imitation
from rlxf.agents.decision_transformer.conditioning import CONDITIONINGS, TargetReturn
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.offline.objectives import OBJECTIVES, MaximumEntropy, QRegularized
from rlxf.cli import main
from rlxf.cli.choices import choice_to_text, parse_choice
from rlxf.cli.commands.train_offline import OfflineOptions
from rlxf.cli.entry_point import parse
from rlxf.data import UniformSteps
from rlxf.training import RunFolder
from rlxf.training.checkpoints import CheckpointFolder
from tests.cli.running import refused
from tests.datasets import ID, random_episodes, record, record_cartpole

SETTABLE = {field.name for field in fields(OfflineOptions)}
TINY = shlex.split(
    "--updates 4 --log-interval 2 --episodes 3 --context-length 4 --batch-size 4 --no-progress-bar"
    " --core.width 8 --core.layers 1 --core.position rope --evaluate-every 0"
)


@pytest.fixture
def data(minari_root):
    """Id of a dataset of random numbers that names CartPole-v1 as its environment."""
    record_cartpole()
    return ID


def train(*args):
    main(["train", "dt", *TINY, *args])


@pytest.mark.parametrize("name", sorted(SETTABLE))
def test_options_have_the_names_and_defaults_of_the_agent(name):
    default = inspect.signature(DecisionTransformer).parameters[name].default
    choices = {"objective": Imitation(), "conditioning": TargetReturn(), "sampling": UniformSteps()}
    expected = choices.get(name, default)
    assert OfflineOptions().arguments()[name] == expected


def test_every_parameter_of_the_agent_is_an_option():
    other_options = {"dataset", "env", "seed", "core", "download", "trust"}
    python_only = {"tensorboard_log", "verbose", "_init_setup_model"}
    assert set(inspect.signature(DecisionTransformer).parameters) == SETTABLE | other_options | python_only


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_can_be_chosen(name):
    options = parse(["train", "dt", "--dataset", "x", "--objective", name])
    assert options.learner.arguments()["objective"] == OBJECTIVES[name]()


@pytest.mark.parametrize("name", CONDITIONINGS)
def test_every_conditioning_can_be_chosen(name):
    options = parse(["train", "dt", "--dataset", "x", "--conditioning", name.lower()])
    assert options.learner.arguments()["conditioning"] == CONDITIONINGS[name]()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q-regularized", QRegularized()),
        ('{"name": "QRegularized", "eta": 2, "hidden_sizes": [8]}', QRegularized(eta=2, hidden_sizes=(8,))),
    ],
)
def test_objectives_have_options(text, expected):
    assert OfflineOptions(objective=text).arguments()["objective"] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Imitaton", "unknown objective 'Imitaton'; did you mean Imitation? Choose one of Imitation, "),
        ('{"name": "QRegularized", "etta": 2}', "QRegularized has no option 'etta'; it has eta, discount, "),
        ('{"eta": 2}', 'objective must be a name or a JSON object with a "name"'),
        ('{"name": 3', "is not valid JSON"),
        ('{"name": "QRegularized", "eta": -1}', "QRegularized eta must be above 0, got -1"),
    ],
)
def test_wrong_objectives_are_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        OfflineOptions(objective=text).arguments()


def test_an_agent_that_predicts_the_return_is_trained_without_a_target(data, capsys):
    train("--dataset", data, "--conditioning", "max-return", "--run", "predicted")
    assert "target return" not in capsys.readouterr().out
    main(["evaluate", "predicted", "--episodes", "2", "--no-progress-bar"])
    assert "mean return" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train("--dataset", data, "--conditioning", "max-return", "--target-returns", "9", "--run", "other")
    assert (
        "--target-returns has no effect, because the agent acts without a target return"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(("name", "published"), [("kzl", KZL), ("odt", ODT)])
def test_published_settings_can_be_chosen(name, published):
    options = parse(["train", "dt", "--dataset", "x", "--settings", name])
    others = {each: value for each, value in OfflineOptions().arguments().items() if each not in published}
    assert options.learner.arguments() | {"core": options.core} == published | others
    assert options.settings == name


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        (MaximumEntropy(), "MaximumEntropy"),
        (MaximumEntropy(temperature=0.2), '{"name": "MaximumEntropy", "temperature": 0.2}'),
    ],
)
def test_text_of_an_objective_has_its_options(objective, text):
    assert choice_to_text(objective) == text
    assert parse_choice("objective", text, OBJECTIVES) == objective


@pytest.mark.parametrize("place", [0, 1], ids=["before", "after"])
def test_options_override_published_settings(place):
    args = [shlex.split("--batch-size 3 --core.layers 1 --core.position rope")]
    args.insert(place, ["--settings=odt"])
    options = parse(["train", "dt", "--dataset", "x", *args[0], *args[1]])
    assert (options.learner.batch_size, options.core.layers) == (3, 1)
    assert options.core.position is not None
    assert (options.learner.weight_decay, options.core.width) == (ODT["weight_decay"], 512)


def test_help_shows_published_settings(capsys):
    with pytest.raises(SystemExit):
        parse(["train", "dt", "--settings", "kzl", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "data. (default: 1000.0)" in shown


def test_the_configuration_contains_the_settings(data):
    train("--dataset", data, "--settings", "kzl", "--run", "run", "--episodes", "0")
    config = json.loads(Path("run/config.json").read_text())
    assert (config["settings"], config["return_scale"], config["batch_size"]) == ("kzl", 1000.0, 4)


def test_files_of_a_run(data, tmp_path):
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
    assert {event.step for event in events.Images("eval/targets")} == {2, 4}
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert (run / "progress.csv").exists()


def test_default_target_is_the_largest_return_of_the_data(data):
    train("--dataset", data)
    run = Path("runs", "dt-test-small-v0-0")
    config = json.loads((run / "config.json").read_text())
    agent = DecisionTransformer.load(run / "checkpoint.zip", device="cpu")
    assert config["target_returns"] == [agent.return_range[1]]


def test_the_context_can_be_the_episode(data):
    train("--dataset", data, "--run", "run", "--context", "episode", *shlex.split("--core.memory rmt"))
    config = json.loads(Path("run/config.json").read_text())
    agent = DecisionTransformer.load("run/checkpoint.zip", device="cpu")
    assert config["context"] == agent.context == "episode"


def test_datasets_are_concatenated(data):
    record_cartpole((4,), "test/more-v0")
    train("--dataset", data, "test/more-v0", "--run", "both")
    agent = DecisionTransformer.load("both/checkpoint.zip", device="cpu")
    assert agent.dataset_info.dataset_ids == (data, "test/more-v0")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dataset", "test/missing-v0"], "dataset 'test/missing-v0' is not in"),
        (["--dataset", "test/small-v0", "--updates", "0"], "updates must be at least 1, got 0"),
        (
            ["--dataset", "test/small-v0", "--episodes", "-1"],
            "episodes must be finite and at least 0, got -1",
        ),
        (
            ["--dataset", "test/small-v0", "--checkpoint-seconds", "-1"],
            "--checkpoint-seconds must be finite and",
        ),
        (["--dataset", "test/small-v0", "--checkpoint-seconds", "nan"], "at least 0, got nan"),
        (["--dataset", "test/small-v0", "--seed", "-1"], "seed must be finite and at least 0, got -1"),
        (
            ["--dataset", "test/small-v0", "--episodes", "0", "--evaluate-every", "2"],
            "--evaluate-every must be 0 or None if --episodes is 0, got 2",
        ),
        (["--dataset", "test/small-v0", "--env-kwargs", '{"gravitas": 1}'], "'gravitas'"),
        (["--dataset", "test/small-v0", "--env-kwargs", "[1]"], "must be a JSON object, got [1]"),
        (
            ["--dataset", "test/small-v0", "--context", "episode"],
            "needs a core with memory, e.g. memory=XL(128), pattern=Window(129), or context='window'",
        ),
        (["--dataset", "test/small-v0", "--context-length", "0"], "must be an integer of at least 1, got 0"),
        (["--dataset", "test/small-v0", "--learning-rate", "fast"], "a schedule is NUMBER"),
        (["--dataset", "test/small-v0", "--env", "Pendulum-v1"], "does not fit dataset test/small-v0"),
        (["--dataset", "test/small-v0", "--env", "Pendlum-v1"], "similar ids: Pendulum-v1"),
    ],
)
def test_errors_are_one_line_and_no_folder_is_created(data, capsys, args, message):
    assert message in refused(capsys, "train", "dt", *TINY, *args)
    assert not Path("runs").exists()


def test_several_targets_are_plotted(data, capsys):
    train("--dataset", data, "--run", "run", "--evaluate-every", "2", "--target-returns", "-2", "2")
    shown = capsys.readouterr().out
    for picture in (Path("run/targets.png"), Path("run/evaluation-best/targets.png")):
        assert f"plot of requested and achieved returns: {picture}\n" in shown
        assert picture.stat().st_size > 1000


def test_a_single_target_is_not_plotted(data, capsys):
    train("--dataset", data, "--run", "run", "--target-returns", "2")
    assert "requested and achieved returns" not in capsys.readouterr().out
    assert not Path("run/targets.png").exists()


def mean_reward(group="evaluation", run="run"):
    """Return the last mean return in the log of the run: "eval" of the training, "evaluation" after it."""
    return EventAccumulator(run).Reload().Scalars(f"{group}/mean_reward")[-1].value


PAID_AT_THE_END = ["--env-kwargs", '{"sutton_barto_reward": true}']


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("env", [[], ["--env", "CartPole-v1"]], ids=["of the data", "named"])
def test_arguments_of_the_environment(data, env, capsys):
    """With these arguments, the reward of CartPole is -1 when the pole falls, and 0 before."""
    train("--dataset", data, "--run", "run", *env, *PAID_AT_THE_END)
    assert mean_reward("eval") == -1
    again = ["evaluate", "run", "--episodes", "2", "--no-progress-bar"]
    message = refused(capsys, *again)
    assert "'CartPole-v1' with sutton_barto_reward=True, which is not used without trust" in message
    assert """--env CartPole-v1 --env-kwargs '{"sutton_barto_reward": true}'""" in message
    main([*again, "--trust"])
    assert mean_reward() == -1
    main([*again, "--env-kwargs", '{"sutton_barto_reward": false}'])
    assert mean_reward() > 5


@pytest.fixture
def nameless(minari_root):
    """Id of a dataset of random numbers with the spaces of CartPole-v1, which names no environment."""
    env = gymnasium.make("CartPole-v1")
    small = spaces.Box(-0.4, 0.4, (4,), np.float32)
    record(random_episodes((9, 3, 12), small, env.action_space), ID, env.observation_space, env.action_space)
    return ID


@pytest.mark.parametrize("evaluation", [[], ["--episodes", "0"]], ids=["evaluated", "not evaluated"])
def test_another_version_of_the_environment_warns_before_training(data, evaluation, capsys):
    train("--dataset", data, "--env", "CartPole-v0", "--run", "other", "--quiet", *evaluation)
    captured = capsys.readouterr()
    assert captured.err.count("data are from CartPole-v1, but the agent acts in CartPole-v0, another") == 1
    train("--dataset", data, "--env", "CartPole-v1", "--run", "same", "--quiet")
    assert "another version" not in capsys.readouterr().err


def test_equal_returns_and_missing_ends_warn_before_training(minari_root, capsys):
    episodes = random_episodes((3, 3))
    for episode in episodes:
        episode.rewards[:] = 0
        episode.terminations[:] = episode.truncations[:] = False
    record(episodes)
    train("--dataset", ID, "--episodes", "0")
    warned = capsys.readouterr().err
    assert "warning: all 2 episodes have the return 0, so" in warned
    assert "check that the rewards were recorded" in warned
    assert "warning: 2 of 2 episodes end neither terminated nor truncated" in warned


def test_datasets_without_environment_need_one_for_evaluation(nameless, capsys):
    message = refused(capsys, "train", "dt", *TINY, "--dataset", nameless)
    assert f"the datasets {nameless} do not name their environment: pass --env ID" in message
    assert "or train without evaluation: --episodes 0" in message
    assert not Path("runs").exists()
    train("--dataset", nameless, "--env", "CartPole-v1", "--run", "named")
    assert mean_reward("eval", "named") > 5


def test_joined_data_of_several_environments_need_one_for_evaluation(minari_root, capsys):
    for name, env in (("one", "CartPole-v1"), ("zero", "CartPole-v0")):
        spaces = gymnasium.make("CartPole-v1").observation_space, gymnasium.make("CartPole-v1").action_space
        record(random_episodes((9, 3), *spaces), f"test/{name}-v0", *spaces, env=gymnasium.spec(env))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train("--dataset", "test/one-v0", "test/zero-v0")
    warning, error = capsys.readouterr().err.splitlines()
    assert "test/one-v0 was recorded in CartPole-v1, but test/zero-v0 in CartPole-v0" in warning
    assert "have different descriptions of their environments (CartPole-v1, CartPole-v0): pass" in error


def test_a_run_without_evaluation(nameless, capsys):
    train("--dataset", nameless, "--run", "run", "--episodes", "0")
    shown = capsys.readouterr().out
    assert "not evaluated because of --episodes 0; run: rlxf evaluate run --env ID\n" in shown
    assert DecisionTransformer.load("run/checkpoint.zip", device="cpu").num_timesteps == 4
    assert "pass --env ID" in refused(capsys, "evaluate", "run")
    main(["evaluate", "run", "--env", "CartPole-v1", "--episodes", "2", "--no-progress-bar"])
    assert mean_reward() > 5


@pytest.mark.faults
def test_error_of_a_full_disk_says_how_to_resume(data, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlxf.cli.training_session.save_agent", full)
    message = refused(capsys, "train", "dt", *TINY, "--dataset", data, "--run", "run")
    assert "the run in run failed: [Errno 28] No space left on device. Fix the cause" in message
    assert message.endswith("resume with: rlxf resume run\n")
    assert RunFolder.reopen("run").resume_checkpoints.files()


@pytest.mark.faults
def test_error_of_a_nan_loss_says_how_to_resume(data, capsys, monkeypatch):
    original, calls = DecisionTransformerModel.losses, iter(range(100))

    def losses(self, batch):
        factor = float("nan") if next(calls) == 2 else 1.0
        return {name: part * factor for name, part in original(self, batch).items()}

    def write_slowly(self, *args):
        time.sleep(1.0)
        write(self, *args)

    write = CheckpointFolder.write
    monkeypatch.setattr(CheckpointFolder, "write", write_slowly)
    monkeypatch.setattr(DecisionTransformerModel, "losses", losses)
    settings = [*TINY, "--dataset", data, "--run", "run", "--checkpoint-seconds", "0"]
    message = refused(capsys, "train", "dt", *settings)
    assert "the run in run failed: update 3: the loss is nan" in message
    assert message.count("\n") == 1
    assert "rlxf resume run, or start a new run from its weights with --pretrained run\n" in message
    main(["resume", "run", "--no-progress-bar"])
    assert DecisionTransformer.load("run/checkpoint.zip", device="cpu").num_timesteps == 4


def test_existing_folders_are_not_changed(data, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    assert "exists" in refused(capsys, "train", "dt", *TINY, "--dataset", data, "--run", "run")
