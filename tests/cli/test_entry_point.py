"""Tests of the entry point: choice of the command, help texts, and errors."""

import ast
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from pkgutil import resolve_name

import pytest

import rlxf
from rlxf.cli.commands import COMMANDS, SUMMARIES
from rlxf.cli.entry_point import main, parse
from tests.cli.running import train
from tests.datasets import record_cartpole
from tests.sources import parsed

WITHOUT_TORCH = [
    *("", "train", "evaluate", "plot", "compare", "experiment", "baseline", "collect", "techniques"),
    *("attention", "pack", "play", "push", "pull", "sweep"),
]
NEED_THE_NETWORK = {"push", "pull"}
"""Commands whose examples are not run: they use the Hugging Face Hub; test_push_pull.py runs both."""


def parse_output(capsys, *args: str) -> tuple[int, str]:
    """Return the exit status and output of a command line that ends while it is parsed."""
    with pytest.raises(SystemExit) as exit_info:
        parse(args)
    captured = capsys.readouterr()
    return exit_info.value.code, captured.out + captured.err


@pytest.mark.parametrize("command", ["", *SUMMARIES])
def test_help_contains_an_example(command, capsys):
    status, text = parse_output(capsys, *command.split(), "--help")
    assert status == 0
    assert "Example: rlxf" in text


@pytest.mark.parametrize("words", SUMMARIES)
def test_overviews_list_the_commands(words, capsys):
    *group, last = words.split()
    status, text = parse_output(capsys, *group, "--help")
    assert status == 0
    assert re.search(rf"• {last} +{' '.join(SUMMARIES[words].split()[:3])}", text)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Expected one of {train, resume, evaluate"),
        (["train"], "Expected one of {gtrxl"),
        (["evalaute"], "rlxf: unknown command evalaute; did you mean evaluate?\n"),
        (["train", "gtxrl"], "rlxf: unknown command train gtxrl; did you mean train gtrxl?\n"),
        (["train", "lstm"], "rlxf: unknown command train lstm; available commands: gtrxl, dt, bc, rvs\n"),
        (["train", "ppo"], "rlxf: unknown command train ppo; did you mean baseline ppo?\n"),
        (["--", "evaluate"], "Unrecognized options"),
    ],
    ids=["nothing", "no agent", "misspelt", "misspelt agent", "unknown agent", "baseline", "after dashes"],
)
def test_unknown_commands_exit_with_2(args, message, capsys):
    status, text = parse_output(capsys, *args)
    assert status == 2
    assert message in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--env x --total-timestep 5", "unknown option --total-timestep; did you mean --total-timesteps?\n"),
        ("--env x --output runs", "unknown option --output; see: rlxf train gtrxl --help\n"),
        ("--env x --no-vidoes", "unknown option --no-vidoes; did you mean --no-videos?\n"),
        ("--total_timestep=5", "unknown option --total-timestep; did you mean --total-timesteps?\n"),
        ("--env x --core.position rope --core.position.bas 9", "did you mean --core.position.base?\n"),
        ("--env x --core.position rope --core.bases 1", "did you mean --core.position.base?\n"),
        (
            "--env x --core.position alibi --core.zoom 1",
            "unknown option --core.zoom; see: rlxf train gtrxl --help\n",
        ),
        ("--env x --whatever", "unknown option --whatever; see: rlxf train gtrxl --help\n"),
    ],
)
def test_unknown_options_propose_the_nearest_name(words, message, capsys):
    status, text = parse_output(capsys, "train", "gtrxl", *words.split())
    assert status == 2
    assert text.startswith("rlxf: unknown option ")
    assert text.endswith(message)


def test_every_option_of_the_help_text_is_known(capsys):
    """For a known option, tyro reports that its value is missing."""
    _, text = parse_output(capsys, "train", "gtrxl", "--help")
    for name in set(re.findall(r"│ (--[a-z.-]+)", text)):
        status, text = parse_output(capsys, "train", "gtrxl", name, "--seed", "no number")
        assert (status, "unknown option" in text) == (2, False), name


@pytest.mark.parametrize("text", ["1e5", "100_000", "100000", "1.0e5", "0.1e6", "100k", "100K", "0.1M"])
@pytest.mark.parametrize("words", ["train gtrxl --env x --total-timesteps", "train dt --dataset x --updates"])
def test_counts_can_have_an_exponent(words, text):
    options = parse([*words.split(), text])
    assert getattr(options, words.rpartition("--")[2].replace("-", "_")) == 100_000


INVALID_COUNTS = [
    *("1.5", "1e-3", "1.5005k", "k", "1m", "many", "nan", "inf", "1e19", "1e30", "1e999999999", ""),
]
COUNTS = ["--evaluate-every", "--seed", "--core.width", "--core.memory.length"]


@pytest.mark.parametrize(
    ("option", "text"),
    [*(("--total-timesteps", text) for text in INVALID_COUNTS), *product(COUNTS, ["1.5005k", ""])],
)
def test_invalid_counts_are_one_line(option, text, capsys):
    """All counts have the same type: each text is tested with one option, and each option with two texts."""
    for words in ([option, text], [f"{option}={text}"]):
        status, message = parse_output(capsys, "train", "gtrxl", "--env", "x", *words)
        rule = "must be a whole number below 1e19, such as 100000, 100_000, 100k or 1e5"
        expected = f"rlxf: {option} {rule}, got {text}"
        assert (status, message) == (2, f"{expected.rstrip()}\n")


def test_invalid_counts_name_their_option(capsys):
    words = ["--target-returns", "3", "9", "--core.position", "rope", "--core.heads", "1.5"]
    status, message = parse_output(capsys, "train", "dt", "--dataset", "x", *words)
    assert (status, message.split(" must be ")[0]) == (2, "rlxf: --core.heads")


def test_invalid_values_are_reported_once(capsys):
    status, text = parse_output(capsys, "train", "gtrxl", "--env", "x", "--core.position", "rotary")
    assert (status, text.count("Value error")) == (2, 1)
    message = "unknown position 'rotary'; did you mean RoPE? Choose one of None,"
    assert message in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("words", COMMANDS)
def test_help_texts_are_wrapped_once(words, capsys, monkeypatch):
    """A line of the help text of an option ends where the next word would not fit. No line is too long."""
    monkeypatch.setenv("COLUMNS", "80")
    _, text = parse_output(capsys, *words.split(), "--help")
    assert all(len(line) <= 80 for line in text.splitlines() if "Example: rlxf" not in line)
    lines = [re.fullmatch(r"│ {7}(\S.*?) *│", line) for line in text.splitlines()]
    for line, after in pairwise(lines):
        if line and after:
            assert len(f"{line[1]} {after[1].split()[0]}") > 70, line[1]


def test_the_version(capsys):
    assert parse_output(capsys, "--version") == (0, f"rlxf {rlxf.__version__}\n")


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("words", ["--version", "train gtrxl --help", "techniques"])
def test_a_closed_pipe_exits_silently(words):
    """The reader of the pipe is closed before anything is written, like that of ``yes | head -1`` later."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rlxf", *words.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_help_loads_no_torch():
    """One process shows all help texts; it prints the commands after which torch is loaded."""
    code = (
        "import sys; from rlxf.cli.entry_point import parse\n"
        f"for command in {WITHOUT_TORCH}:\n"
        "    try: parse([*command.split(), '--help'])\n"
        "    except SystemExit: print(*[command, 'loads'] * ('torch' in sys.modules), file=sys.stderr)\n"
        "    else: print('no help of', command, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
    assert done.stdout.count("Example: rlxf") == len(WITHOUT_TORCH)


def test_version_is_printed_without_torch_and_commands():
    code = (
        "import sys; from rlxf.cli import main\n"
        "try: main(['--version'])\n"
        "finally: print(*{'torch', 'minari', 'rlxf.attention'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"rlxf {rlxf.__version__}\n\n")


def test_the_package_can_be_run_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "rlxf", "evaluate", "nowhere"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "there is no run folder nowhere" in done.stderr


@pytest.mark.parametrize("module", ["gymnasium", "tyro"])
@pytest.mark.parametrize("program", [["-m", "rlxf"], [str(Path(sys.executable).with_name("rlxf"))]])
def test_ctrl_c_during_the_imports_is_one_line(program, module, tmp_path):
    """A module that is imported early sends the signal; Gymnasium is imported by the package itself."""
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise ImportError('no signal')"
    (tmp_path / f"{module}.py").write_text(code)
    done = subprocess.run(
        [sys.executable, *program, "techniques"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        stderr=subprocess.PIPE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, b"rlxf: interrupted\n")


def test_import_of_the_package_keeps_the_handler_of_ctrl_c():
    code = "import signal, rlxf; assert signal.getsignal(signal.SIGINT) is not rlxf.exit_on_interrupt"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("words", COMMANDS)
def test_overview_and_help_of_a_command_agree(words):
    summary = inspect.getdoc(resolve_name(COMMANDS[words])).partition(".")[0]
    assert set(SUMMARIES[words].rstrip(".").split()[:2]) <= set(summary.split())


def options() -> dict[str, ast.ClassDef]:
    """Return the classes that are parsed from the command line: those with the decorator ``options``."""
    nodes = [node for tree in parsed("rlxf/cli").values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return {node.name: node for node in classes if "options" in [ast.unparse(d) for d in node.decorator_list]}


SHARED = {
    *("CheckpointSeconds", "ConfigFile", "ConfigTrust", "Device", "LogInterval", "PrecisionOption"),
    *("Pretrained", "Quiet", "StopReturn", "Track", "Trust", "TunedName"),
    *("Datasets", "Download", "EvaluateEvery", "EvaluationEnv", "EvaluationEnvArguments", "TrustData"),
    *("Updates", "Videos"),
}
"""Types of options that contain the help text."""


@pytest.mark.parametrize("name", options())
def test_every_option_has_a_help_text(name):
    body = options()[name].body
    for line, after in pairwise(body):
        if not isinstance(line, ast.AnnAssign) or ast.unparse(line.annotation) in SHARED:
            continue
        if "name=''" not in ast.unparse(line):
            assert isinstance(after, ast.Expr), f"{name}: {ast.unparse(line)}"
            assert len(ast.literal_eval(after.value)) > 10


RUN = (
    "n_envs = 2\nn_steps = 16\nsegment_length = 8\nbatch_size = 16\ncore.memory.length = 4\n"
    "total_timesteps = 64\nepisodes = 3\nattention_maps_every = 'None'\nvideos = false\nquiet = true\n"
)
"""Options of a tiny training of GTrXL."""
FILES = {
    "memory.toml": "seeds = [0]\n[tasks.pole]\nenv = 'CartPole-v1'\n"
    f"[agents.gtrxl]\ncommand = 'train gtrxl'\n{RUN}",
    "sweep.toml": "command = 'train gtrxl'\ntrials = 1\n"
    f"[settings]\nenv = 'CartPole-v1'\n{RUN}[search]\ncore.width = [8, 16]\n",
}
"""Path -> content of the files of examples."""
DURATIONS = {"--total-timesteps": 4096, "--steps": 2048, "--updates": 20, "--episodes": 20}
"""Options of examples that are limited in the test; the first one to two rollouts, with evaluations."""


def shortened(example: str) -> list[str]:
    """Return the words of an example, with shorter training and evaluations."""
    words = shlex.split(example)
    for option, after in pairwise(range(len(words))):
        if words[option] in DURATIONS:
            words[after] = str(min(int(words[after]), DURATIONS[words[option]]))
    return [*words, *["--evaluation-episodes", "2"] * ("--total-timesteps" in words)]


def test_only_durations_of_examples_are_shortened():
    words = shortened("train x --total-timesteps 20000 --updates 5 --episodes 500 --steps 9999")
    expected = "train x --total-timesteps 4096 --updates 5 --episodes 20 --steps 2048"
    assert " ".join(words) == f"{expected} --evaluation-episodes 2"
    assert shortened("play runs/x") == ["play", "runs/x"]


@pytest.mark.thorough
@pytest.mark.slow
def test_examples_of_help_texts_run(capsys, minari_root):
    for path, text in FILES.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    record_cartpole(range(1, 13), "cartpole/random-v0")
    train("--run", "runs/tmaze-calm", "--core.depth", "calm", "--core.layers", "2")
    for home in (COMMANDS[words] for words in COMMANDS if words not in NEED_THE_NETWORK):
        main(shortened(re.search(r"Example: rlxf (.+)", resolve_name(home).__doc__)[1]))
    assert "Evaluation over 20 episodes" in capsys.readouterr().out
