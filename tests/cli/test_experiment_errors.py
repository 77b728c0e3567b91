"""Tests of errors in the options of an experiment file, which name the line and similar keys."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import ClassVar

import gymnasium
import pytest

from rlxf.attention import Window, register_technique
from rlxf.cli.commands import COMMANDS
from rlxf.cli.config_values import known_options
from rlxf.cli.entry_point import command_words
from rlxf.cli.experiment_errors import warn_about_environments, warn_about_replaced_settings
from rlxf.cli.job_options import is_about_one_option, named_option, read_options
from rlxf.cli.sweep_run import SweepRun
from rlxf.experiments import experiment_file, sweep_file
from rlxf.experiments.experiment_file import read_plan
from rlxf.experiments.plan import COMMANDS as PLAN_COMMANDS
from rlxf.experiments.sweep_file import read_sweep_plan
from rlxf.experiments.toml_files import RESERVED, PlanError, TomlReader
from tests.cli.running import refused

FILE = """\
[settings]
episodes = 3

[tasks.pole]
env = "CartPole-v1"
{task}

[agents.random]
command = "baseline random"
{agent}

[agents.ppo]
command = "baseline ppo"
{ppo}
"""
COMBINED = {"name": "Both", "first": {"name": "Full"}, "second": {"name": "Far"}}
"""Two patterns of which one is defined outside of rlxf."""
OVERRIDE = "[tasks.pole.agents.random]\n{}"


@pytest.mark.parametrize(
    ("table", "text", "message"),
    [
        ("task", "scorerange = [0, 1]", "line 6: agent random on task pole: unknown option scorerange; did "),
        ("task", "scorerange = [0, 1]", "did you mean score_range?"),
        (
            "task",
            "agnets.ppo.n_envs = 2",
            "line 6: agent random on task pole: unknown option agnets; did you",
        ),
        ("task", "stop_retur = 1", "line 6: agent random on task pole: unknown option --stop-retur; did"),
        (
            "agent",
            "comand = 'x'",
            "line 10: agent random on task pole: unknown option comand; did you mean com",
        ),
        (
            "agent",
            "quit = true",
            "line 10: agent random on task pole: unknown option --quit; did you mean --q",
        ),
        ("agent", "quit = false", "line 10: agent random on task pole: unknown option --no-quit"),
        (
            "agent",
            "frame_stak = 2",
            "line 10: agent random on task pole: unknown option --frame-stak; did you",
        ),
        (
            "agent",
            "track = 2026-01-01",
            "line 10: agent random on task pole: track must contain texts or num",
        ),
        ("agent", "env_kwargs.x = 2026-01-01", "line 10: agent random on task pole: env_kwargs must contain"),
        ("ppo", OVERRIDE.format("total_timestep = 1"), "line 15: agent random on task pole: unknown option"),
        (
            "ppo",
            OVERRIDE.format("comand = 'x'"),
            "line 15: agent random on task pole: unknown option --comand",
        ),
    ],
)
def test_errors_name_the_line_and_similar_keys(tmp_path, capsys, table, text, message):
    tables = {"task": "", "agent": "", "ppo": ""} | {table: text}
    Path("small.toml").write_text(FILE.format(**tables))
    assert message in refused(capsys, "experiment", "small.toml")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("table", "text", "message"),
    [
        (
            "ppo",
            "arguments = { n_step = 16 }",
            "line 14: agent ppo on task pole: --arguments of PPO: unknown",
        ),
        (
            "ppo",
            "arguments.gamma = 0.9\narguments.n_step = 16",
            "line 15: agent ppo on task pole: --arguments",
        ),
        (
            "ppo",
            "arguments = { n_step = 16 }",
            "unknown argument n_step; did you mean n_steps? Choose one of",
        ),
        (
            "ppo",
            "arguments.gamma = true",
            "line 14: agent ppo on task pole: gamma in --arguments of PPO must",
        ),
        ("ppo", "arguments = 3", "line 14: agent ppo on task pole: --arguments must be a JSON object, got 3"),
        (
            "agent",
            "arguments = { gamma = 1 }",
            "line 10: agent random on task pole: random actions have no --a",
        ),
        ("task", "env_kwargs = 3", "line 6: agent random on task pole: --env-kwargs must be a JSON object"),
        (
            "ppo",
            "curriculum = { stages = 3 }",
            "line 14: agent ppo on task pole: --curriculum: a curriculum needs",
        ),
        (
            "ppo",
            "curriculum = { stages = 3, advance_return = 1 }",
            "--curriculum: the stages of a curriculum",
        ),
        ("ppo", "help = true", "line 14: agent ppo on task pole: help is for the command line only"),
        ("ppo", "n_envs = true", "line 14: agent ppo on task pole: n_envs must be a whole number"),
        ("ppo", "n_envs = [4, 5]", "line 14: agent ppo on task pole: n_envs must be a whole number"),
        ("ppo", "stop_return = nan", "line 14: agent ppo on task pole: stop_return must be finite, got nan"),
        ("ppo", "stop_return = 'x'", "line 14: agent ppo on task pole: stop_return must be a number"),
        (
            "ppo",
            "normalize_observations = 'yes'",
            "line 14: agent ppo on task pole: normalize_observations must be true or false, got 'yes'",
        ),
        ("ppo", "n_envs = 0", "line 14: agent ppo on task pole: --n-envs must be at least 1, got 0"),
        ("ppo", OVERRIDE.format("env = ''"), "line 15: agent random on task pole: --env is empty: name an"),
    ],
)
def test_values_are_checked_before_any_run_is_trained(tmp_path, capsys, table, text, message):
    """The agent "random" comes first, and would be trained before."""
    test_errors_name_the_line_and_similar_keys(tmp_path, capsys, table, text, message)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("tuned = 'tmaze-5'", "--tuned: unknown tuned settings 'tmaze-5'; did you mean tmaze-50?"),
        (
            "tuned = 'mujoco'",
            "--tuned: the tuned settings 'mujoco' are for rlxf train bc, not for rlxf train gtrxl",
        ),
        (
            "config = 'run'",
            "run/config.json: it belongs to a run of rlxf baseline ppo, whose options rlxf train",
        ),
        (
            "config = 'own.toml'",
            "own.toml, line 1: n_env is not an option of this command; did you mean n_envs?",
        ),
        ("config = 'no.toml'", "no.toml: check the path"),
    ],
)
def test_faults_of_a_named_settings_file_are_at_the_line_that_names_it(capsys, named, message):
    Path("own.toml").write_text("n_env = 2\n")
    Path("run").mkdir()
    Path("run/config.json").write_text('{"program": "rlxf baseline", "agent": "ppo"}')
    Path("small.toml").write_text(
        f"tasks.pole.env = 'CartPole-v1'\n[agents.one]\ncommand = 'train gtrxl'\n{named}\n"
    )
    error = refused(capsys, "experiment", "small.toml")
    assert error.startswith("rlxf: small.toml, line 4: agent one on task pole: --")
    assert message in error


@pytest.mark.parametrize("dataset", ["''", "[]", "['a/b-v0', '']"])
def test_tasks_without_datasets_are_refused(capsys, dataset):
    Path("small.toml").write_text(f"tasks.pole.dataset = {dataset}\n[agents.one]\ncommand = 'train bc'\n")
    error = refused(capsys, "experiment", "small.toml")
    assert "line 1: agent one on task pole: --dataset is empty: name one or more Minari datasets" in error


@pytest.mark.parametrize("command", PLAN_COMMANDS)
def test_keys_of_files_are_told_apart_from_options(command, tmp_path):
    """No option is refused as a key of the file, or as a misspelled key of a table."""
    known = known_options(resolve_name(COMMANDS[command_words(command.split()) or ""]))
    for reader in (experiment_file._Reader, sweep_file._Reader):
        reader(tmp_path, "").check_reserved(dict.fromkeys({*known} - {*RESERVED}), "settings")
    for key in ("env", "dataset", "command"):
        TomlReader(tmp_path, "").check_spelling(dict.fromkeys({*known} - {key}), (key,), "settings")


@pytest.mark.parametrize(
    ("named", "own", "replaced"),
    [
        ("tuned = 'tmaze-50'", "", "total_timesteps"),
        ("tuned = 'tmaze-50'", "total_timesteps = 9", None),
        ("config = 'own.toml'", "total_timesteps = 9", "gamma"),
        ("", "", None),
    ],
)
def test_settings_that_replace_those_of_a_file_of_an_agent_are_warned_about(recwarn, named, own, replaced):
    Path("own.toml").write_text("gamma = 0.9\nn_envs = 2\n")
    Path("small.toml").write_text(
        "settings = { total_timesteps = 8, gamma = 0.5 }\n[tasks.pole]\nenv = 'CartPole-v1'\n"
        f"[agents.one]\ncommand = 'train gtrxl'\n{named}\n{own}\n"
    )
    warn_about_replaced_settings(Path("small.toml"), read_plan(Path("small.toml")))
    messages = [str(each.message) for each in recwarn]
    assert len(messages) == (replaced is not None)
    assert all(f"[settings] replaces {replaced} of the file" in each for each in messages)


@pytest.mark.parametrize(
    ("env", "kwargs", "message"),
    [
        (
            "CartPol-v1",
            "",
            "small.toml, line 5: runs on task pole may fail: unknown environment id 'CartPol-v1'",
        ),
        (
            "Pendulum-v1",
            "{ gg = 3 }",
            "line 6: runs on task pole may fail: Pendulum-v1 takes no argument 'gg'",
        ),
        (
            "rlxf/TMaze-v0",
            "{ corridor = 3 }",
            "line 6: runs on task pole may fail: rlxf/TMaze-v0 takes no arg",
        ),
        (
            "Pendulum-v1",
            "{ id = 3 }",
            "line 6: runs on task pole may fail: Pendulum-v1 takes no argument 'id'",
        ),
        ("Pendulum-v1", "{ g = 3, max_episode_steps = 9 }", None),
        ("rlxf/TMaze-v0", "{ corridor_length = 3 }", None),
        ("my_package:MyTask-v0", "{ x = 3 }", None),
        ("popgym-NoSuchTask-v0", "", None),
    ],
)
@pytest.mark.usefixtures("tmp_path")
def test_environments_that_cannot_be_created_are_warned_about(recwarn, env, kwargs, message):
    task = f"env_kwargs = {kwargs}" if kwargs else ""
    text = FILE.replace("CartPole-v1", env).format(task=task, agent="", ppo="")
    Path("small.toml").write_text(text)
    warn_about_environments(Path("small.toml"), *plan_and_options())
    assert len(recwarn) == (message is not None)
    assert message is None or message in str(recwarn[0].message)


def plan_and_options():
    plan = read_plan(Path("small.toml"))
    options = {(task.name, agent.name): plan.options(task, agent) for task, agent in plan.pairs()}
    return plan, options


def test_arguments_of_one_agent_are_warned_about_at_their_line(recwarn):
    text = FILE.format(task="", agent="env_kwargs = { x = 1 }", ppo="").replace("CartPole", "MountainCar")
    Path("small.toml").write_text(text.replace("MountainCar-v1", "MountainCar-v0"))
    warn_about_environments(Path("small.toml"), *plan_and_options())
    (message,) = [str(each.message) for each in recwarn]
    assert "line 10: runs on task pole may fail: MountainCar-v0 takes no argument 'x'" in message


def test_an_environment_whose_import_fails_is_left_to_its_run(recwarn):
    gymnasium.register("test/Broken-v1", entry_point="rlxf.envs.specs:no_such_class")
    Path("small.toml").write_text(
        FILE.format(task="env_kwargs = { x = 1 }", agent="", ppo="").replace("CartPole-v1", "test/Broken-v1")
    )
    try:
        warn_about_environments(Path("small.toml"), *plan_and_options())
    finally:
        del gymnasium.registry["test/Broken-v1"]
    assert len(recwarn) == 0


def test_arguments_of_a_missing_package_do_not_stop_other_runs(monkeypatch):
    """The run itself fails later, with the name of the package."""
    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    words = ["baseline", "recurrent-ppo", "--env", "CartPole-v1", "--arguments", '{"n_steps": 16}']
    assert read_options(words)["arguments"] == {"n_steps": 16}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train gtrxl --env CartPole-v1 --env-kwargs 3", "--env-kwargs must be a JSON object, got 3"),
        (
            "train gtrxl --env CartPole-v1 --curriculum {}".format('{"stages":3}'),
            "--curriculum: a curriculum needs",
        ),
        ("train gtrxl --env CartPole-v1 --learning-rate linear:1", "linear:1"),
        ("train gtrxl --env CartPole-v1 --n-envs 0", "--n-envs must be at least 1, got 0"),
        ("train bc --dataset a/b-v0 --env-kwargs 3", "--env-kwargs must be a JSON object, got 3"),
        ("train bc --dataset a/b-v0 --sampling Uniform", "unknown sampling 'Uniform'; did you mean Uniform"),
        ("train rvs --dataset a/b-v0 --updates 0", "--updates must be at least 1, got 0"),
        ("train dt --dataset a/b-v0 --objective {}".format('{"name":"Imitation","x":1}'), "no option 'x'"),
        ("train dt --dataset a/b-v0 --conditioning Max", "unknown conditioning 'Max'"),
    ],
)
def test_options_of_trainings_are_checked_without_data_and_environments(words, message):
    with pytest.raises(ValueError, match=message):
        read_options(words.split())


@pytest.fixture
def far(restored_registry):
    """Register a pattern that a module outside of rlxf defines."""

    @register_technique("pattern")
    @dataclass(frozen=True)
    class Far(Window):
        cost: ClassVar[str] = "L"


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize(
    "words",
    [
        ["train", "gtrxl", "--env", "CartPole-v1", "--core.pattern", "far"],
        ["train", "dt", "--dataset", "a/b-v0", "--core.pattern", "far"],
        ["train", "dt", "--dataset", "a/b-v0", "--core.pattern", json.dumps(COMBINED)],
    ],
    ids=["GTrXL", "Decision Transformer", "combined"],
)
def test_techniques_that_the_processes_of_runs_do_not_import_are_refused(words):
    message = (
        "--core.pattern must be a technique of rlxf, got Far of tests.cli.test_experiment_errors: each run"
    )
    with pytest.raises(ValueError, match=message) as error:
        read_options(words)
    assert named_option(error.value, ["core.pattern"]) == "core.pattern"
    assert is_about_one_option(error.value)


@pytest.mark.usefixtures("far")
def test_a_sweep_over_a_technique_of_another_module_is_refused():
    text = (
        'command = "train gtrxl"\n[settings]\nenv = "CartPole-v1"\n[search]\ncore.pattern = ["Far", "Window"]'
    )
    Path("sweep.toml").write_text(text)
    plan = read_sweep_plan(Path("sweep.toml"))
    with pytest.raises(PlanError, match=r"line 5: .*must be a technique of rlxf, got Far"):
        SweepRun(plan, Path("runs"), processes=1, threads=1).check_options()


@pytest.mark.parametrize(
    ("message", "option"),
    [
        ("unknown option --n-env; did you mean --n-envs?", "n_env"),
        ("--n-envs must be at least 1", "n_envs"),
        ("unknown option --core.memory.lenght; did you mean --core.memory.length?", "core.memory.lenght"),
        ("unknown option --core.no-qk-norm", "core.qk_norm"),
        ("--arguments of PPO: unknown argument n_step; did you mean n_steps?", "arguments.n_step"),
        ("--arguments must be a JSON object", "arguments"),
        (
            "--arguments must be numbers: schedules are constant, got a text for learning_rate",
            "arguments.learning_rate",
        ),
        ("n_steps in --arguments of PPO must be a number, got 'a text'", "arguments.n_steps"),
        ("unknown sampling 'Uniform'", "sampling"),
        ("heads must divide width, got 2 heads and width 9", None),
    ],
)
def test_the_option_of_a_message_is_found(message, option):
    names = {
        "n_env",
        "n_envs",
        "core",
        "core.memory.lenght",
        "core.memory.length",
        "core.qk_norm",
        "sampling",
    }
    names |= {"arguments.n_steps", "arguments.n_step", "arguments.text", "arguments.learning_rate"}
    assert named_option(ValueError(message), names) == option
