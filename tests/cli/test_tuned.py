"""Tests of tuned settings: their files, ``--tuned`` and ``rlxf tuned``."""

import re
import tomllib
from dataclasses import replace

import pytest

from rlxf.agents.decision_transformer import decision_transformer
from rlxf.agents.decision_transformer.conditioning import HighestValueReturn
from rlxf.agents.offline.objectives import QRegularized
from rlxf.attention import GRU, DeltaNet
from rlxf.cli import main
from rlxf.cli.entry_point import parse
from rlxf.data import HighReturns
from rlxf.training import linear
from rlxf.tuned import COMMANDS, description, tuned_file, tuned_files
from tests.cli.running import refused
from tests.sources import ROOT

FILES = [(command, name) for command in COMMANDS for name in tuned_files(command)]


@pytest.mark.parametrize(("command", "name"), FILES)
def test_files_are_valid_settings_with_task_result_and_command(command, name):
    file = tuned_file(name, command)
    task, result, measured = description(file)
    assert task.endswith(".")
    assert any(character.isdigit() for character in result)
    assert measured.startswith(("rlxf ", "scripts/bench.py "))
    settings = tomllib.loads(file.read_text())
    required = [] if command == "train gtrxl" else ["--dataset", "cartpole/random-v0"]
    options = parse([*command.split(), *required, "--tuned", name])
    if command == "train gtrxl":
        assert options.task.env == settings["env"]
        assert options.task.env_kwargs == settings.get("env_kwargs", {})
        assert options.total_timesteps == settings["total_timesteps"]
    else:
        assert options.dataset == ("cartpole/random-v0",)
        assert options.updates == settings["updates"]
        assert options.learner.arguments()  # raises for invalid values


@pytest.mark.parametrize("name", tuned_files("train gtrxl"))
def test_the_command_of_settings_measures_them(name):
    """The benchmark of default settings has no other options, and the other commands name the settings."""
    file = tuned_file(name, "train gtrxl")
    measured = description(file)[-1]
    settings = tomllib.loads(file.read_text())
    if measured == "scripts/bench.py defaults":
        assert settings.keys() <= {"env", "env_kwargs", "total_timesteps"}
    else:
        assert measured.startswith(("rlxf experiment scripts/", f"rlxf train gtrxl --tuned {name}"))


@pytest.mark.parametrize(("command", "name"), FILES)
def test_the_documentation_lists_settings_with_their_results(command, name):
    page = (ROOT / "docs" / "how-to" / "use-settings-files.md").read_text(encoding="utf-8")
    task, result, _ = description(tuned_file(name, command))
    assert f"\n| `{command}` | `{name}` | {task} | {result} |\n" in page


def test_names_are_unique_over_all_commands():
    names = [name for _, name in FILES]
    assert len({*names}) == len(names)


def test_settings_for_datasets_are_those_of_the_benchmark():
    cloning = parse(["train", "bc", "--tuned", "mujoco", "--dataset", "a/b-v0"]).learner.arguments()
    assert (cloning["sampling"], cloning["weight_averaging"]) == (HighReturns(0.25), 0.9999)
    conditioned = parse(["train", "dt", "--tuned", "mujoco-dt", "--dataset", "a/b-v0"])
    assert conditioned.core == decision_transformer(width=64, layers=2, dropout=0.0)
    names = ("weight_averaging", "context_length", "batch_size", "return_scale")
    assert [conditioned.learner.arguments()[name] for name in names] == [0.999, 10, 32, None]
    words = ["train", "dt", "--tuned", "classic-control", "--dataset", "a/b-v0", "--core.width", "32"]
    options = parse(words)
    assert options.core == decision_transformer(width=32, layers=2)
    arguments = options.learner.arguments()
    chosen = [arguments[name] for name in ("objective", "conditioning", "context_length", "batch_size")]
    assert chosen == [QRegularized(), HighestValueReturn(), 10, 32]
    assert repr(arguments["learning_rate"]) == repr(linear(1e-3, 1e-4))


def test_options_on_the_command_line_have_precedence():
    tuned = parse(["train", "gtrxl", "--tuned", "tmaze-250"])
    assert (tuned.core.recurrence, tuned.learner.n_steps) == (DeltaNet(), 512)
    words = ["--core.recurrence", "gru", "--n-steps", "256"]
    for options in ([*words, "--tuned", "tmaze-250"], ["--tuned", "tmaze-250", *words]):
        changed = parse(["train", "gtrxl", *options])
        assert (changed.core.recurrence, changed.learner.n_steps) == (GRU(), 256)
        assert changed.learner.batch_size == tuned.learner.batch_size


@pytest.mark.parametrize(("command", "name"), FILES)
def test_a_printed_file_names_its_command_and_gives_the_same_options(tmp_path, capsys, command, name):
    main(["tuned", name])
    file = tmp_path / "own.toml"
    file.write_text(capsys.readouterr().out)
    assert f"# Use: rlxf {command} --config FILE" in file.read_text()
    data = [] if command == "train gtrxl" else ["--dataset", "cartpole/random-v0"]
    words = [*command.split(), *data]
    own, tuned = (parse([*words, *given]) for given in (["--config", str(file)], ["--tuned", name]))
    assert replace(own, config=None) == replace(tuned, tuned=None)


def test_help_shows_tuned_settings_also_without_datasets(capsys):
    with pytest.raises(SystemExit):
        main(["train", "dt", "--tuned", "classic-control", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "(default: 7500)" in out
    assert re.search(r"Minari ids, which are concatenated\..*?\(required\).*?--settings", out)


def test_all_settings_are_listed(capsys):
    main(["tuned"])
    out = capsys.readouterr().out
    assert all(name in out for _, name in FILES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tuned", "tmaze-25"], "unknown tuned settings 'tmaze-25'; did you mean tmaze-250? Choose one of"),
        (["tuned", "../gtrxl/pendulum"], "unknown tuned settings '../gtrxl/pendulum'"),
        (["train", "gtrxl", "--tuned", "hopper"], "unknown tuned settings 'hopper'"),
        (
            ["train", "bc", "--tuned", "pendulum", "--dataset", "a/b-v0"],
            "--tuned: the tuned settings 'pendulum' are for rlxf train gtrxl, not for rlxf train bc; cho",
        ),
        (
            ["train", "dt", "--tuned", "classic-control", "--settings", "odt", "--dataset", "a/b-v0"],
            "--tuned and --settings both name settings of the agent: use one of them",
        ),
        (
            ["train", "gtrxl", "--tuned", "pendulum", "--config", "x.toml"],
            "--config and --tuned both name settings",
        ),
    ],
)
def test_invalid_names_are_refused(capsys, words, message):
    assert message in refused(capsys, *words)
