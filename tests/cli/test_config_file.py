"""Tests of ``--config``: settings files, their precedence, and files of strangers."""

import json
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import get_origin

import gymnasium
import pytest

from rlxf import GTrXLPPO
from rlxf.attention import RoPE, TransformerSpec
from rlxf.attention.registry import TECHNIQUES, technique_to_json
from rlxf.cli import main, spec_options
from rlxf.cli.commands import COMMANDS
from rlxf.cli.config_file import JSON_OPTIONS, to_arguments
from rlxf.cli.config_values import CHOICES, SettingsError, known_options
from rlxf.cli.entry_point import parse
from rlxf.cli.run_options import options_to_config
from rlxf.cli.runs import GTRXL, TRAINING_COMMANDS
from rlxf.utils.toml import MAX_BYTES
from tests.cli.running import TASK, TINY, refused, train, wrong_usage
from tests.datasets import ID, record_cartpole
from tests.sources import ROOT

GTRXL_WORDS = ["train", "gtrxl", "--config", "settings.toml"]


def write(text, name="settings.toml"):
    Path(name).write_text(text)


def from_file(text, *args, words="train gtrxl --env x"):
    """Return the options of a command with a settings file."""
    write(text)
    return parse([*words.split(), "--config", "settings.toml", *args])


# Words of the command line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n-envs": 3, "n_steps": 4}, "--n-envs 3 --n-steps 4"),
        ({"core": {"memory": {"length": 64}}}, "--core.memory.length 64"),
        ({"core.memory.length": 64}, "--core.memory.length 64"),
        ({"core": {"recurrence": "GRU", "memory": None}}, "--core.recurrence GRU --core.memory None"),
        (
            {"core": {"position": {"name": "RoPE", "base": 9.0}}},
            "--core.position RoPE --core.position.base 9.0",
        ),
        ({"videos": False, "quiet": True}, "--no-videos --quiet"),
        ({"core": {"final_norm": False}}, "--core.no-final-norm"),
        ({"dataset": ["a", "b"], "target_returns": []}, "--dataset a b --target-returns"),
        ({"target_returns": [-5, -1e-9]}, "--target-returns -5 -1e-09"),
        ({"env_kwargs": {"a": {"name": "b"}}}, """--env-kwargs '{"a": {"name": "b"}}'"""),
        (
            {"objective": {"name": "QRegularized", "eta": 2}},
            """--objective '{"name": "QRegularized", "eta": 2}'""",
        ),
        (
            {"core": {"pattern": {"name": "Both", "first": {"name": "Full"}, "second": {"name": "Full"}}}},
            """--core.pattern '{"name": "Both", "first": {"name": "Full"}, "second": {"name": "Full"}}'""",
        ),
    ],
    ids=str,
)
def test_words_of_settings(settings, words):
    assert to_arguments(settings) == shlex.split(words)


@pytest.mark.parametrize(
    "value", ["--trust", "-h", "-", "--", "-5 --trust", ["a", "--trust-data"], "-5--trust"]
)
def test_values_cannot_become_options(value):
    with pytest.raises(ValueError, match="must not begin with a dash"):
        to_arguments({"dataset": value})


@pytest.mark.parametrize("value", [object(), [[1]], [True], [{}]])
def test_values_of_other_types_are_rejected(value):
    with pytest.raises(SettingsError, match="dataset must contain texts or numbers"):
        to_arguments({"dataset": value})


@pytest.mark.parametrize("value", [date(2026, 1, 1), float("nan"), [object()]])
@pytest.mark.parametrize("name", ["env_kwargs", "core.pattern"])
def test_entries_of_tables_that_json_does_not_have_are_rejected(name, value):
    table = {"name": "Window", "inner": {"entry": value}}
    with pytest.raises(SettingsError, match=f"{name} must contain texts, finite numbers") as error:
        to_arguments({name: table})
    assert error.value.name == name


ALL_TECHNIQUES = [technique for techniques in TECHNIQUES.values() for technique in techniques.values()]


def variants(technique):
    """Yield a technique with default options, and with each of its flags changed."""
    yield technique()
    for field in fields(technique):
        if isinstance(field.default, bool):
            with suppress(ValueError):  # the flag has no effect with the defaults
                yield technique(**{field.name: not field.default})


@pytest.mark.parametrize("technique", ALL_TECHNIQUES)
def test_every_technique_is_read_as_written(technique, monkeypatch):
    """Techniques are not joined to a spec here, because many of them are incompatible with the defaults."""
    monkeypatch.setattr(spec_options, "without_unused_defaults", lambda *_, **axes: SimpleNamespace(**axes))
    axis = next(axis for axis, named in TECHNIQUES.items() if technique.__name__ in named)
    for each in variants(technique):
        settings = {"memory": None, axis: technique_to_json(each)}
        options = parse(["train", "gtrxl", "--env", "x", *to_arguments({"core": settings})])
        assert getattr(options.core, axis) == each


def test_options_with_json_are_known():
    """Tables of these options are one JSON text; other tables have names of options as keys."""
    commands = [*TRAINING_COMMANDS.values(), "baseline"]
    known = [known_options(resolve_name(COMMANDS[words])).items() for words in commands]
    tables = {name for options in known for name, hint in options if get_origin(hint) is dict}
    assert tables | set(CHOICES) == set(JSON_OPTIONS)


# Configurations of runs

RUNS = {
    "train gtrxl": [
        "--env CartPole-v1",
        "--env CartPole-v1 --core.recurrence gru --no-videos --target-kl 0.1 --ent-coef 0.5",
        "--env CartPole-v1 --core.kernel lsh --core.memory.length 7 --device cpu",
        "--env CartPole-v1 --core.memory none --core.pattern 'strided & window' --core.residual highway-gate",
        "--env CartPole-v1 --core.depth calm --core.position none --core.heads 2 --core.feed-forward 99",
        "--env CartPole-v1 --core.recurrence mamba2 --core.attention-layers 1 --core.qk-norm rms",
    ],
    "train dt": [
        "--dataset a b",
        "--dataset a --settings kzl --target-returns 1 -2.5 --updates 5",
        "--dataset a --settings odt --core.position rope --core.position.base 99 --context-length 3",
        '--dataset a --objective \'{"name": "QRegularized", "eta": 2}\' --env y --env-kwargs \'{"a": 1}\'',
        "--dataset a --conditioning max-return --weight-averaging 0.9 --baselines --learning-rate cosine:1:0",
    ],
    "pretrain": ["--dataset a --mask-probability 0.3 --core.position t5-bias"],
    "train bc": ["--dataset a --best 0.5 --hidden-sizes 3 4 5 --objective MaximumEntropy"],
    "train rvs": ["--dataset a --target-returns 1e-7 3 --return-scale 2"],
}


def write_config(words, options, name="run/config.json", **changes):
    """Write the configuration of a run with these options, and return it."""
    agent = {command: agent for agent, command in TRAINING_COMMANDS.items()}[words]
    config = {"agent": agent} | options_to_config(options) | changes
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(json.dumps(config))
    return config


@pytest.mark.filterwarnings("ignore:pattern")
@pytest.mark.filterwarnings("ignore:the default position")
@pytest.mark.parametrize(("words", "args"), [(words, args) for words in RUNS for args in RUNS[words]])
def test_a_configuration_gives_the_options_of_its_run(words, args):
    options = parse([*words.split(), *shlex.split(args)])
    config = write_config(words, options)
    again = parse([*words.split(), "--config", "run", *(["--trust"] if config.get("env_kwargs") else [])])
    assert options_to_config(again) == options_to_config(options)
    if config.get("core"):
        assert again.core == options.core


@pytest.mark.parametrize("args", ["--core.memory.length 9", "--core.recurrence gru", "--core.kernel lsh"])
@pytest.mark.filterwarnings("ignore:the default position")
def test_techniques_of_a_run_adapt_like_defaults(args):
    """A longer memory widens the fitting pattern, and a recurrence removes what only attention uses."""
    write_config("train gtrxl", parse(["train", "gtrxl", *TASK]))
    again = parse(["train", "gtrxl", "--config", "run", *args.split()])
    assert again.core == parse(["train", "gtrxl", *TASK, *args.split()]).core


def weights(run):
    return (Path(run) / "checkpoint.zip").read_bytes()


def test_gtrxl_trains_again_from_its_configuration():
    techniques = ["--core.residual", "highway-gate", "--core.position", "rope", "--core.position.base", "99"]
    train("--run", "one", "--normalize-observations", "--normalize-rewards", *techniques)
    main(["train", "gtrxl", "--config", "one", "--run", "two", "--no-progress-bar"])
    assert weights("one") == weights("two")
    assert Path("one/config.json").read_bytes() == Path("two/config.json").read_bytes()
    main(["train", "gtrxl", "--config", "one/config.json", "--seed", "1", "--run", "three"])
    assert weights("one") != weights("three")
    assert json.loads(Path("three/config.json").read_text())["env_kwargs"] == {"corridor_length": 3}


OFFLINE = shlex.split("--updates 4 --episodes 2 --evaluate-every 2 --batch-size 4 --no-progress-bar")
OFFLINE_RUNS = {
    "train dt": "--core.width 8 --core.layers 1 --core.position t5-bias --target-returns 3 9",
    "train bc": "--hidden-sizes 8 8 --best 0.5 --dropout 0.1",
    "train rvs": "--hidden-sizes 8",
    "pretrain": "--core.width 8 --core.layers 1",
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("words", OFFLINE_RUNS)
def test_offline_agents_train_again_from_their_configuration(words, minari_root):
    record_cartpole(range(1, 21))
    options = ["--updates", "4", "--batch-size", "4", "--no-progress-bar"] if words == "pretrain" else OFFLINE
    main([*words.split(), "--dataset", ID, *options, *OFFLINE_RUNS[words].split(), "--run", "one"])
    main([*words.split(), "--config", "one", "--run", "two", "--no-progress-bar"])
    assert weights("one") == weights("two")
    assert Path("one/config.json").read_bytes() == Path("two/config.json").read_bytes()


# Precedence


def test_a_settings_file_trains_like_the_command_line():
    train("--run", "one")
    write(
        """
        env = "rlxf/TMaze-v0"
        env_kwargs = {corridor_length = 3}
        n-envs = 2
        n-steps = 16
        segment_length = 8
        batch-size = 16
        n-epochs = 2
        total-timesteps = "64"
        episodes = 3
        progress-bar = false
        attention-maps-every = "None"
        videos = false
        evaluate_every = 0
        run = "two"
        [core]
        memory.length = 4
        width = 8
        heads = 2
        """
    )
    main(GTRXL_WORDS)
    assert weights("one") == weights("two")
    assert Path("one/config.json").read_bytes() == Path("two/config.json").read_bytes()


def test_options_override_the_file():
    text = (
        "n_envs = 3\nvideos = false\nlearning_rate = 0.5\n[core]\nattention-layers = [0]\nrecurrence = 'GRU'"
    )
    options = from_file(text, "--n-envs=4", "--videos", "--core.attention_layers", "1")
    assert (options.learner.n_envs, options.tensorboard.videos, options.learner.learning_rate) == (
        4,
        True,
        "0.5",
    )
    assert options.core.attention_layers == (1,)
    data = from_file("dataset = ['a', 'b']\ntarget-returns = [1, 2]", "--dataset", "c", words="train dt")
    assert (data.dataset, data.target_returns) == (("c",), (1.0, 2.0))
    none = from_file("dataset = 'a'\ntarget-returns = [1, 2]", "--target-returns", "None", words="train dt")
    assert (none.dataset, none.target_returns) == (("a",), None)
    turned_off = from_file("core.final_norm = true\nvideos = true", "--core.no-final-norm", "--no-videos")
    assert (turned_off.core.final_norm, turned_off.tensorboard.videos) == (False, False)


ROPE = "[core.position]\nname = 'RoPE'\nbase = 9"


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        (ROPE, "", "--core.position rope --core.position.base 9"),
        (ROPE, "--core.position.base 5", "--core.position rope --core.position.base 5"),
        (ROPE, "--core.position alibi", "--core.position alibi"),
        (ROPE, "--core.position none", "--core.position none"),
        (ROPE, "--core.position rope", "--core.position rope --core.position.base 9"),
        (ROPE, """--core.position '{"name": "RoPE"}'""", "--core.position rope"),
        ("core.residual.bias = 9", "--core.residual gru-gate", "--core.residual.bias 9"),
        ("core.residual.bias = 9", "--core.residual add", "--core.residual add"),
        ("core.pattern = 'strided & window'\ncore.memory = 'None'", "--core.pattern full --core.memory none",
         "--core.pattern full --core.memory none"),
        ("core.memory.length = 9", "--core.memory xl", "--core.memory.length 9"),
    ],
    ids=str,
)  # fmt: skip
def test_techniques_of_options_replace_those_of_the_file(text, args, expected):
    found = from_file(text, *shlex.split(args)).core
    assert found == parse(["train", "gtrxl", "--env", "x", *shlex.split(expected)]).core


def test_published_settings_replace_the_values_of_the_file():
    words = "train dt --dataset a"
    text = "settings = 'kzl'\ncontext_length = 5\nupdates = 7\n[core]\nwidth = 16"
    file = from_file(text, words=words)
    assert (file.learner.context_length, file.core.width, file.core.layers) == (5, 16, 3)
    odt = from_file(text, "--settings", "odt", words=words)
    assert odt.learner == parse([*words.split(), "--settings", "odt"]).learner
    assert (odt.core.width, odt.core.layers, odt.updates, odt.settings) == (512, 4, 7, "odt")


def test_another_environment_has_no_arguments_of_the_file():
    text = "env = 'one'\nenv_kwargs = {a = 1}"
    for env, kwargs in (("one", {"a": 1}), ("two", {})):
        write(text)
        assert parse([*GTRXL_WORDS, "--env", env]).task.env_kwargs == kwargs
    write("env_kwargs = {a = 1}")
    assert parse([*GTRXL_WORDS, "--env", "one"]).task.env_kwargs == {"a": 1}, "the file names no environment"


def test_other_data_have_their_own_environment_and_returns():
    """The configuration of a run contains values that were computed from its datasets."""
    options = parse(["train", "dt", "--dataset", "a", "b", "--trust-data", "--context-length", "3"])
    resolved = {"env": "x", "target_returns": [9.0], "return_scale": 7.0, "episode_length": 99}
    write_config("train dt", options, **resolved)
    again = ["train", "dt", "--config", "run", "--trust"]
    same = options_to_config(parse([*again, "--dataset", "a", "b"]))
    assert {name: same[name] for name in resolved} == resolved
    assert same["trust_data"]
    default = options_to_config(parse(["train", "dt", "--dataset", "a", "--context-length", "3"]))
    for other in (["a"], ["b", "a"]):
        assert options_to_config(parse([*again, "--dataset", *other])) == default | {"dataset": other}
    given = parse([*again, "--dataset", "c", "--env", "y", "--target-returns", "5"])
    assert (given.env, given.target_returns) == ("y", (5.0,))


def test_names_of_options_may_have_underscores():
    write("env = 'one'\nenv_kwargs = {a = 1}")
    assert parse([*GTRXL_WORDS, "--env_kwargs", '{"b": 2}']).task.env_kwargs == {"b": 2}


@pytest.mark.parametrize("option", ["--config", "--tuned"])
def test_an_empty_name_of_settings_is_refused(option, capsys):
    message = refused(capsys, "train", "gtrxl", "--env", "CartPole-v1", option, "")
    assert f"{option} is empty: name the settings, or leave it out" in message
    assert parse(["train", "gtrxl", "--env", "CartPole-v1", option, "None"]).task.env == "CartPole-v1"


def test_the_last_settings_file_counts():
    write("n_envs = 3")
    write("n_steps = 3", "other.toml")
    learner = parse([*GTRXL_WORDS, "--config=other.toml", "--env", "x"]).learner
    assert (learner.n_envs, learner.n_steps) == (32, 3)


def test_help_shows_the_values_of_the_file(capsys):
    write("env = 'x'\nn_envs = 77\n[core.position]\nname = 'RoPE'\nbase = 88")
    with pytest.raises(SystemExit):
        main([*GTRXL_WORDS, "--gamma", "0.66", "--help"])
    text = capsys.readouterr().out
    for default in ("77", "88", "0.66"):
        assert f"(default: {default}" in text


def test_the_file_of_the_documentation_is_valid():
    page = ROOT / "docs/how-to/use-settings-files.md"
    (text,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    write(text)
    options = parse([*GTRXL_WORDS, "--seed", "1"])
    assert (options.task.env_kwargs, options.seed) == ({"corridor_length": 9}, 1)
    assert (options.core.position, options.core.memory.length) == (RoPE(base=500.0), 16)


# Bad input


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n_envs = ", "settings.toml: it is not valid TOML: Invalid value"),
        ("\n\nn_envs = 1\nn-envs == 2", "(at line 4, column"),
        ("\nn_env = 3", "line 2: n_env is not an option of this command; did you mean n_envs?"),
        ("[core.memory]\nlenght = 3", "core.memory.lenght is not an option of this command; did you mean"),
        ("[core]\nmemory = {lenght = 3}", "line 2: core.memory.lenght is not an option"),
        ("[optimizer]\nlr = 3", "line 2: optimizer.lr is not an option"),
        ("[optimizer]", "line 1: optimizer is not an option"),
        ('"\\u001b[1m\\n" = 3', "'\\x1b[1m\\n' is not an option"),
        ("a" * 1_000_000 + " = 3", "aaaa' is not an option"),
        ("core.position = 'None'\ncore.position.base = 3", "not valid TOML"),
        ("[core.memory]\nname = 'None'\nlength = 3", "line 3: core.memory.length is not an option"),
        ("core.position = 'rotary'", "core.position is invalid: unknown position 'rotary'; did you mean"),
        ("core.pattern = '{'", "core.pattern is invalid: { is not valid JSON"),
        ("[core.pattern]\nname = 'window'\nsize = -4", "Window size must be at least 1"),
        ("seed = 1\nn_envs = '2x'", "line 2: n_envs must be a whole number below 1e19"),
        ("n_envs = 1.5", "n_envs must be a whole number"),
        ("n_envs = true", "n_envs must be a whole number"),
        ("gamma = '0.9'", "gamma must be a number, got '0.9'"),
        ("gamma = nan", "gamma must be a number, got nan"),
        ("videos = 1", "videos must be true or false, got 1"),
        ("precision = 'float64'", "precision must be one of float32, bf16-mixed, got 'float64'"),
        ("env_kwargs = 5", "env_kwargs must be an object, got 5"),
        ("seed = 2020-01-01", "seed must be a whole number"),
        ("[[seed]]", "seed must be a whole number"),
        ("[core]\nattention_layers = ['a']", "core.attention_layers must be a list, each entry"),
        ("core.memory.length = []", "core.memory.length must be a whole number"),
        ("n_envs = 3\nn-envs = 4", "line 1: n_envs is set twice, in two spellings"),
        ("'core.width' = 3\ncore.width = 4", "core.width is set twice, in two spellings"),
        ("policy = '--trust'", "policy must not begin with a dash, got '--trust'"),
        ("\nconfig = 'x.toml'", "line 2: config is for the command line only: pass one file with --config"),
        ("tuned = 'pendulum'", "line 1: tuned is for the command line only: pass --tuned NAME in place of"),
        ("trust = true", "trust is for the command line only: pass --trust"),
        ("help = true", "help is for the command line only: remove it"),
        ("command = 'x'", "command is not an option of this command; see: rlxf train gtrxl --help"),
        ("x = " + "[" * 100_000, "is nested too deeply"),
        ("x = " + "{a = " * 100_000, "is nested too deeply"),
        ("a" + ".a" * 300_000 + " = 1", "the key in line 1 has more than 64 parts"),
        ("[a" + ".a" * 300_000 + "]", "the key in line 1 has more than 64 parts"),
        ("'='" + ".a" * 300_000 + " = 1", "the key in line 1 has more than 64 parts"),
        ('"\\"="' + ".a" * 300_000 + " = 1", "the key in line 1 has more than 64 parts"),
        ("'\u2028'" + ".a" * 300_000 + " = 1", "the key in line 1 has more than 64 parts"),
        ("x = {a" + ".a" * 300_000 + " = 1}", "the key in line 1 has more than 64 parts"),
        ("x = " + "9" * 5000, "settings.toml: "),
        ("#" * MAX_BYTES + "#", "is larger than 1,048,576 bytes, the limit of settings files"),
        ("\0", "is not a text in UTF-8"),
        ('{"a": }', "it is not valid JSON: Expecting value: line 1 column 7"),
        ('{"a": 1}', "it names no agent"),
        ('{"agent": ["gtrxl"]}', "it names no agent"),
        ('{"agent": "other"}', "it belongs to another program with the agent 'other', not to rlxf train"),
        ("{" + '"a":{' * 100_000, "it is not valid JSON: JSON nested deeper than 64"),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_bad_settings_are_one_line(text, message, capsys):
    write(text)
    assert message in refused(capsys, *GTRXL_WORDS, "--env", "x")


def test_options_of_other_commands_are_no_options(capsys):
    """``rlxf train rvs`` has no tuned settings."""
    write("tuned = 'mujoco'")
    error = refused(capsys, "train", "rvs", "--dataset", "a/b-v0", "--config", "settings.toml")
    assert "line 1: tuned is not an option of this command; see: rlxf train rvs --help" in error


def test_bad_files_are_one_line(tmp_path, capsys):
    def error(path):
        return refused(capsys, "train", "gtrxl", "--env", "x", "--config", str(path))

    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\xff")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link/config.json").symlink_to("/etc/hostname")
    assert "there is no settings file none.toml" in error("none.toml")
    assert "--config: image.png is not a text in UTF-8: give a TOML file, or the folder of a run" in error(
        "image.png"
    )
    assert "/dev/zero is not a regular file" in error("/dev/zero")
    assert "empty is not a run folder: it has no config.json" in error("empty")
    assert "is a symbolic link" in error("link")


def test_an_empty_file_sets_nothing():
    assert from_file("# nothing\n\n[core]\n[core.memory]") == replace(
        parse(["train", "gtrxl", "--env", "x"]), config=Path("settings.toml")
    )


# Runs of other agents, and files of strangers


@pytest.mark.parametrize(
    ("words", "own"), [("train gtrxl", "train dt"), ("train bc", "train rvs"), ("pretrain", "train dt")]
)
def test_the_configuration_of_another_agent_names_the_right_command(words, own, capsys):
    required = ["--env", "x"] if own == "train gtrxl" else ["--dataset", "a"]
    write_config(own, parse([*own.split(), *required]))
    message = refused(capsys, *words.split(), "--config", "run")
    expected = f"belongs to a run of rlxf {own}, not of rlxf {words}: use rlxf {own} --config run/config.json"
    assert expected in message


@pytest.fixture
def options():
    return parse(["train", "gtrxl", *TASK, *TINY])


def refusal(capsys, *args):
    return refused(capsys, "train", "gtrxl", "--config", "run", "--run", "new", *args)


def test_configurations_of_other_programs_are_refused(options, capsys):
    write_config("train gtrxl", options, teacher="runs/one")
    assert "belongs to a run of rlxf distill, not of rlxf train gtrxl" in refusal(capsys)
    write_config("train gtrxl", options, program="scripts/demo.sh")
    assert "belongs to another program" in refusal(capsys)
    write_config("train gtrxl", options, program="rlxf baseline", agent="recurrent-ppo")
    assert (
        "--config: run/config.json: it belongs to a run of rlxf baseline recurrent-ppo, whose options rlxf "
        "train gtrxl cannot read: write the settings as TOML"
    ) in refusal(capsys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "/tmp/elsewhere"}, "run is unknown to this version"),
        ({"download": True}, "download is unknown to this version"),
        ({"trust": True}, "trust is unknown to this version"),
        ({"config": "other"}, "config is unknown to this version"),
        (
            {"total_timestep": 3},
            "total_timestep is unknown to this version of rlxf; did you mean total_timesteps?",
        ),
        ({"n_envs": "2"}, "has n_envs = '2', which must be an integer"),
        ({"policy": "--trust"}, "policy must not begin with a dash"),
        ({"n_envs": 10**7}, "needs too much memory"),
        ({"core": {"width": 2**30}}, ""),
        ({"core": 5}, "TransformerSpec must be a JSON object"),
        ({"core": TransformerSpec(causal=False).to_dict()}, "core must be causal, without cross_attention"),
        ({"core": {"pattern": "--trust"}}, "pattern must be an object"),
    ],
    ids=str,
)
def test_altered_configurations_are_refused(changes, message, options, capsys):
    write_config("train gtrxl", options, **changes)
    assert message in refusal(capsys)
    assert not Path("new").exists()


def test_a_missing_value_is_refused(options, capsys):
    config = write_config("train gtrxl", options)
    del config["gamma"]
    Path("run/config.json").write_text(json.dumps(config))
    assert "'gamma' is missing; the file was changed" in refusal(capsys)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Id of an environment that is registered by a module."""
    (tmp_path / "strange_tasks.py").write_text(
        "import gymnasium\ngymnasium.register('strange/Maze-v0', entry_point='rlxf.envs.tmaze:TMaze')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "strange_tasks:strange/Maze-v0"
    sys.modules.pop("strange_tasks", None)
    gymnasium.registry.pop("strange/Maze-v0", None)


def test_modules_of_configurations_are_imported_with_trust_only(module, options, capsys):
    write_config("train gtrxl", options, env=module)
    for args in ([], ["--env-kwargs", "{}"], ["--seed", "3"], ["--env", module], ["--trust", "--no-trust"]):
        assert "module that a file names is not imported" in refusal(capsys, *args)
        assert "strange_tasks" not in sys.modules
    main(["train", "gtrxl", "--config", "run", "--run", "new", "--trust"])
    assert "strange_tasks" in sys.modules


def test_the_user_can_name_the_module_of_a_configuration(module, options):
    write_config("train gtrxl", options, env=module, env_kwargs={})
    main(["train", "gtrxl", "--config", "run", "--run", "new", "--env", module])
    assert json.loads(Path("new/config.json").read_text())["env"] == module


def test_modules_of_settings_files_are_those_of_the_user(module):
    write(f"env = '{module}'\nenv_kwargs = {{corridor_length = 3}}")
    main([*GTRXL_WORDS, *TINY, "--run", "new"])
    assert GTrXLPPO.load("new/checkpoint.zip").num_timesteps == 64


def test_many_workers_of_configurations_need_trust(options, capsys):
    write_config("train gtrxl", options, workers=4000, n_envs=4000)
    assert "the run has 4,000 worker processes" in refusal(capsys)
    sizes = ["--workers", "0", "--n-envs", "2"]
    main(["train", "gtrxl", "--config", "run", "--run", "new", *sizes])
    assert json.loads(Path("new/config.json").read_text())["workers"] == 0


def test_arguments_of_configurations_need_trust(options, capsys):
    write_config("train gtrxl", options, env="CartPole-v1", env_kwargs={"render_mode": "human"})
    for args in ([], ["--env", "CartPole-v1"]):
        assert "is not used without trust" in refusal(capsys, *args)


def test_trust_in_data_is_not_taken_from_a_configuration(capsys):
    write_config("train bc", parse(["train", "bc", "--dataset", "a", "--trust-data"]))
    message = refused(capsys, "train", "bc", "--config", "run")
    assert "was trained with --trust-data" in message
    for args in (["--trust"], ["--trust-data"]):
        assert parse(["train", "bc", "--config", "run", *args]).trust_data
    assert not parse(["train", "bc", "--config", "run", "--no-trust-data"]).trust_data


def test_errors_of_a_core_are_reported_as_on_the_command_line(capsys):
    write("core.heads = 7")
    assert "heads must divide width" in wrong_usage(capsys, *GTRXL_WORDS, "--env", "x")


def test_every_agent_has_a_command():
    assert set(TRAINING_COMMANDS.values()) == {
        words
        for words in COMMANDS
        if "config" in {field.name for field in fields(resolve_name(COMMANDS[words]))}
    }
    assert TRAINING_COMMANDS[GTRXL] == "train gtrxl"
