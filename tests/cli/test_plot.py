"""Tests of ``rlxf plot`` and ``rlxf compare``: output, files and errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from rlxf.cli import main
from rlxf.cli.options import check_figure_path
from rlxf.evaluation import intervals
from rlxf.experiments.figures import FORMATS
from tests.cli.running import refused, train
from tests.experiments.logs import write_monitor, write_run

COMMANDS = ["plot", "compare"]


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 199)


@pytest.fixture
def run(capsys):
    def call(*args):
        capsys.readouterr()
        main(list(args))
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


def write_runs(**config):
    for seed in range(3):
        write_run(f"runs/a-{seed}", (1, 2, 3 + seed), seed=seed, **config)
    write_run("runs/b-0", (0, 1, 2), n_envs=8)


def files():
    return sorted(path.as_posix() for path in Path().rglob("*") if path.is_file())


def test_learning_curves_are_plotted(run):
    write_runs()
    before = files()
    out, err = run("plot", "runs")
    assert out.splitlines()[:2] == [
        "metric: eval/mean_reward; choose another one with --metric",
        "plot of learning curves: plot.png",
    ]
    assert re.search(
        r"CartPole-v1, gtrxl, n_envs=4: 3 seeds, eval/mean_reward 4 \(3.* to .*\) at step 300", out
    )
    assert "CartPole-v1, gtrxl, n_envs=8: 1 seed, eval/mean_reward 2 at step 300" in out
    assert err == ""
    assert set(files()) - set(before) == {"plot.png"}
    with Image.open("plot.png") as image:
        assert image.format == "PNG"


def test_no_command_loads_torch():
    """One process runs both commands, and prints the heavy packages that they loaded."""
    write_runs()
    code = (
        "import sys\nfrom rlxf.cli import main\n"
        "main(['plot', 'runs'])\n"
        "main(['compare', 'runs', '--output', 'table.md', '--plot', 'scores.png'])\n"
        "print('loaded:', {'torch', 'stable_baselines3', 'minari'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "loaded: set()"
    assert {"plot.png", "table.md", "scores.png"} <= set(files())


def test_runs_that_ended_early_are_counted_where_their_last_value_is_kept(run):
    write_runs(stop_return=8)
    solved = write_run("runs/a-3", (1, 8), seed=3, stop_return=8)
    (solved / "completed.json").write_text('{"steps": 200, "ended_early": true, "sha256": {}}')
    out, _ = run("plot", "runs")
    assert re.search(
        r"4 seeds, eval/mean_reward 5 \(.*\) at step 300, with the last value of 1 that ended early", out
    )
    out, _ = run("plot", "runs", "--metric", "rollout/ep_rew_mean")
    assert out.count("ended early") == 1


def test_runs_of_the_train_command_are_plotted_and_compared(run, finished):
    out, err = run("plot", str(finished), "--output", "a.svg", "--smooth", "2")
    assert re.search(
        r"rlxf/TMaze-v0, corridor_length=3, gtrxl: 1 seed, eval/mean_reward \S+ at step 64\n", out
    )
    assert err == ""
    out, _ = run("compare", str(finished), "--metric", "eval/success_rate")
    assert "rlxf/TMaze-v0, corridor_length=3: last eval/success_rate" in out
    assert "metric:" not in out


def test_a_killed_run_is_marked(run):
    train("--run", "killed")
    os.unlink("killed/completed.json")
    os.unlink("killed/checkpoint.zip")
    assert "1 seed, 1 unfinished, eval/mean_reward" in run("plot", "killed")[0]
    assert "1, 1 unfinished" in run("compare", "killed")[0]


def test_a_killed_run_does_not_shorten_the_line_of_its_group(run):
    write_runs()
    write_run("runs/a-3", (9,), seed=3, finished=False)
    out, _ = run("plot", "runs")
    count = "n_envs=4: 3 seeds, 1 unfinished run left out"
    assert re.search(rf"{count}, eval/mean_reward 4 \(.*\) at step 300", out)


def test_the_fallback_of_the_metric_is_printed(run):
    write_monitor("logs/0.monitor.csv", [1, 2])
    assert "metric: rollout/ep_rew_mean; choose another one" in run("plot", "logs")[0]


def test_an_existing_plot_is_replaced(run):
    write_runs()
    Path("plot.png").write_text("old")
    run("plot", "runs")
    assert Path("plot.png").read_bytes().startswith(b"\x89PNG")


def test_tables_have_one_row_for_each_group_and_one_table_for_each_task(run):
    write_runs()
    write_run("runs/c-0", (7, 7, 7), env="Acrobot-v1")
    out, _ = run("compare", "runs", "--output", "t.json", "--plot", "scores.png", "--last", "2")
    assert "CartPole-v1: mean of the last 2 values of eval/mean_reward" in out
    assert "Acrobot-v1: mean of the last 2 values of eval/mean_reward" in out
    assert "comparison: t.json\nplot of scores: scores.png\n" in out
    found = json.loads(Path("t.json").read_text())
    assert [(row["task"], row["seeds"], row["mean"]) for row in found] == [
        ("CartPole-v1", 3, 3.0),
        ("CartPole-v1", 1, 1.5),
        ("Acrobot-v1", 1, 7.0),
    ]
    assert Path("scores.png").exists()


@pytest.mark.parametrize("name", ["t.csv", "t.md", "t.json"])
def test_equal_logs_give_equal_files(run, name):
    write_runs()
    run("compare", "runs", "--output", name)
    first = Path(name).read_bytes()
    run("compare", "runs", "--output", name)
    assert Path(name).read_bytes() == first


def test_groups_can_be_named(run):
    write_runs()
    out, _ = run("compare", "runs", "--groups", "all=runs/*")
    assert re.search(r"│ all +│ 4 ", out)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no runs given"),
        (["nowhere"], "there is no run nowhere"),
        (["empty"], "empty contains no run"),
        (["runs", "--metric", "eval/mean_rewards"], "did you mean eval/mean_reward"),
        (["runs", "--groups", "x"], "--groups must be NAME=PATTERN"),
        (["runs", "--output", "x.txt"], "--output must be a file name that ends in"),
        (["runs", "--output", "missing/x.png"], "--output must be"),
        (["runs", "damaged"], "damaged/progress.csv line 2: eval/mean_reward must be a number, got 'x'"),
        (["unlogged"], "nothing was logged yet"),
    ],
    ids=range(9),
)
def test_bad_input_is_one_line_and_writes_nothing(command, args, message, capsys):
    write_runs()
    Path("empty").mkdir()
    damaged = write_run("damaged") / "progress.csv"
    damaged.write_text("time/total_timesteps,eval/mean_reward\n1,x\n")
    (write_run("unlogged") / "progress.csv").write_text("")
    before = files()
    assert message in refused(capsys, command, *args)
    assert files() == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plot", "runs", "--smooth", "0"], "--smooth must be at least 1, got 0"),
        (["compare", "runs", "--last", "0"], "--last must be at least 1, got 0"),
        (["compare", "runs", "--plot", "x.gif"], "--plot must be a file name that ends in .png"),
        (["compare", "runs", "--output", "missing/x.csv"], "create missing first"),
    ],
)
def test_other_options_are_checked(args, message, capsys):
    write_runs()
    assert message in refused(capsys, *args)


@pytest.mark.parametrize("name", ["progress.csv", "config.json"])
def test_files_of_a_run_are_not_replaced(name, capsys):
    write_runs()
    before = Path(f"runs/a-0/{name}").read_bytes()
    assert "belongs to a run" in refused(capsys, "compare", "runs", "--output", f"runs/a-0/{name}")
    assert Path(f"runs/a-0/{name}").read_bytes() == before


def test_a_given_log_file_is_not_replaced(capsys):
    Path("log.csv").write_text("step,x\n1,2\n")
    message = refused(capsys, "compare", "log.csv", "--metric", "x", "--output", "log.csv")
    assert "belongs to a run" in message


def test_a_folder_that_is_not_writable_is_one_line(capsys, monkeypatch):
    write_runs()
    monkeypatch.setattr(
        "os.replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    for args in (["plot", "runs"], ["compare", "runs", "--output", "t.csv"]):
        assert "cannot write" in refused(capsys, *args)
    assert not list(Path().glob("*.*"))


def test_warnings_are_one_line_each(run):
    write_runs()
    (write_run("runs/x-0", n_envs=9) / "progress.csv").write_text("")
    _, err = run("plot", "runs", "runs/a-0")
    assert err.splitlines() == [
        "rlxf: warning: runs/a-0 is given twice, and counts once",
        "rlxf: warning: runs left out, because nothing was logged yet: runs/x-0",
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_names_in_a_run_reach_the_terminal_without_control_characters(command, run):
    write_run("runs/a", env="Evil-v0\x1b[31m", agent="x\x1b]0;y\x07", env_kwargs={"a": "\x1b[2J"})
    write_run("runs/b", env="Evil-v0\x1b[31m", agent="$z$")
    out, err = run(command, "runs")
    assert "\x1b" not in out + err
    assert "\x07" not in out + err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plot.jpg", "ends in .png, .pdf, .svg, got"),
        ("plot", "ends in"),
        ("no/plot.png", "create .*no first"),
    ],
)
def test_other_paths_of_figures_are_refused(tmp_path, name, message):
    with pytest.raises(ValueError, match=f"--output must be .*{message}"):
        check_figure_path("--output", tmp_path / name, FORMATS)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match="--plot must be a file name"):
        check_figure_path("--plot", tmp_path / "folder.png", FORMATS)
