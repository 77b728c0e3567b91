"""Tests of ``rlxf experiment``: missing runs, failures, options, and the tables that it writes."""

import json
import os
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from rlxf.cli import main
from rlxf.cli.commands.experiment import _Progress
from rlxf.cli.entry_point import parse
from rlxf.cli.job_options import check_same, needs_trust, read_options
from rlxf.experiments.execution import only_process
from rlxf.experiments.jobs import Job, Outcome
from rlxf.experiments.summary import other_results
from rlxf.training import RunFolder
from tests.cli.running import refused

FILE = """\
seeds = 2

[settings]
episodes = 3

[tasks.pole]
env = "CartPole-v1"
score_range = [0, 500]

[tasks.missing]
env = "NoSuchPackage-v0"
score_range = [0, 1]

[agents.random]
command = "baseline random"
quiet = true
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(FILE)
    return tmp_path / "runs" / "small"


def run(capsys, *words: str) -> str:
    main(["experiment", "small.toml", *words])
    return capsys.readouterr().out


def run_with_failures(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as exited:
        main(["experiment", "small.toml", *words])
    out, err = capsys.readouterr()
    assert exited.value.code == 2
    assert "rlxf: 2 of 4 runs failed; the same command tries them again" in err
    return out


@pytest.mark.slow
def test_runs_are_processes(folder, capsys):
    Path("small.toml").write_text(FILE.replace("seeds = 2", "seeds = 1"))
    with pytest.raises(SystemExit):
        main(["experiment", "small.toml", "--processes", "2"])
    out = capsys.readouterr().out
    assert "failed: missing/random/seed-0: unknown environment id 'NoSuchPackage-v0'" in out
    table = (folder / "table.md").read_text()
    assert "| random | 1 of 1 |" in table
    assert "| random | 0 of 1, 1 failed |" in table


@pytest.mark.usefixtures("runs_in_process")
def test_runs_are_trained_once_and_failures_stand_in_the_table(folder, capsys):
    out = run_with_failures(capsys)
    assert "4 runs, 0 of them complete" in out
    assert "failed: missing/random/seed-1: unknown environment id 'NoSuchPackage-v0'" in out
    table = (folder / "table.md").read_text()
    assert "| random | 2 of 2 |" in table
    assert "| random | 0 of 2, 2 failed |" in table
    assert "- missing/random/seed-0: unknown environment id" in table
    results = json.loads((folder / "results.json").read_text())
    returns = {(each["task"], each["seed"]): each["returns"] for each in results["runs"]}
    assert [len(returns["pole", seed]) for seed in (0, 1)] == [3, 3]
    assert returns["missing", 0] is None
    evaluation = json.loads((folder / "pole/random/seed-1/evaluation.json").read_text())
    assert returns["pole", 1] == evaluation["last"]["returns"]
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"

    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("pole/*/*/completed.json")}
    out = run_with_failures(capsys)
    assert "4 runs, 2 of them complete" in out
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    outcome = json.loads((folder / "missing/random/seed-0.json").read_text())
    assert outcome["attempts"] == 2


@pytest.mark.usefixtures("runs_in_process")
def test_a_run_that_outlived_its_program_has_its_time(folder, capsys):
    text = FILE.replace('[tasks.missing]\nenv = "NoSuchPackage-v0"\nscore_range = [0, 1]\n', "")
    Path("small.toml").write_text(text.replace("seeds = 2", "seeds = 1"))
    run(capsys)
    record = folder / "pole/random/seed-0.json"
    killed = json.loads(record.read_text()) | {"returncode": None, "seconds": 0.0}
    record.write_text(json.dumps(killed))
    end = (folder / "pole/random/seed-0/completed.json").stat().st_mtime
    os.utime(record, (end - 90, end - 90))
    assert "1 runs, 1 of them complete" in run(capsys)
    assert json.loads(record.read_text()) | {"returncode": 0, "seconds": 90.0} == json.loads(
        record.read_text()
    )
    assert "| 1.5 |" in (folder / "table.md").read_text()


MAZE = """\
[tasks.maze]
env = "rlxf/TMaze-v0"
{}

[agents.small]
command = "train gtrxl"
{}
policy = "MlpPolicy"
n-envs = 2
n-steps = 8
segment-length = 8
batch-size = 16
episodes = 1
evaluate-every = 0
quiet = true
core.width = 8
core.layers = 1
core.heads = 1
"""


@pytest.mark.usefixtures("runs_in_process")
@pytest.mark.parametrize("source", ["dashes", "tuned"])
def test_arguments_of_the_environment_are_compared_with_those_of_the_command(folder, capsys, source):
    """They may have dashes in their name, or come from tuned settings; the second call completes the run."""
    kwargs, tuned = (
        ("env-kwargs = {corridor_length=9}", "") if source == "dashes" else ("", 'tuned = "tmaze-50"')
    )
    Path("small.toml").write_text(MAZE.format(kwargs, f"total-timesteps = 16\n{tuned}"))
    run(capsys)
    (folder / "maze/small/seed-0/completed.json").unlink()
    assert "1 runs, 0 of them complete" in run(capsys)
    config = json.loads((folder / "maze/small/seed-0/config.json").read_text())
    assert config["env_kwargs"]["corridor_length"] == (9 if source == "dashes" else 50)
    (folder / "maze/small/seed-0/config.json").write_text(json.dumps(config | {"env": "CartPole-v1"}))
    message = refused(capsys, "experiment", "small.toml")
    assert "has env = 'CartPole-v1' in its config.json, but small.toml has 'rlxf/TMaze-v0'" in message


@pytest.mark.usefixtures("runs_in_process")
def test_changed_options_are_refused(folder, capsys):
    text = FILE.replace('[tasks.missing]\nenv = "NoSuchPackage-v0"\nscore_range = [0, 1]\n', "")
    Path("small.toml").write_text(text.replace("seeds = 2", "seeds = 1"))
    run(capsys)
    Path("small.toml").write_text(text)  # another seed is added
    assert "2 runs, 1 of them complete" in run(capsys)
    Path("small.toml").write_text(text.replace("episodes = 3", "episodes = 4"))
    message = refused(capsys, "experiment", "small.toml")
    assert "seed-0 was trained with --episodes 3, but small.toml has --episodes 4: move the folder" in message
    Path("small.toml").write_text(text.replace("episodes = 3", ""))
    message = refused(capsys, "experiment", "small.toml")
    assert "seed-0 was trained with --episodes 3, but small.toml has no --episodes: move" in message
    reordered = text.replace("quiet = true", "").replace("episodes", "quiet = true\nepisodes")
    Path("small.toml").write_text(reordered)
    assert "2 runs, 2 of them complete" in run(capsys)
    config = folder / "pole/random/seed-0/config.json"
    Path("small.toml").write_text(text)
    config.write_text(config.read_text().replace("CartPole-v1", "evil:CartPole-v1"))
    message = refused(capsys, "experiment", "small.toml")
    assert "has env = 'evil:CartPole-v1' in its config.json" in message
    config.write_text(config.read_text().replace("evil:CartPole-v1", "CartPole-v1"))
    config.write_text(config.read_text().replace('"total_timesteps": 200000', '"total_timesteps": 300000'))
    message = refused(capsys, "experiment", "small.toml")
    assert "has total_timesteps = 300000 in its config.json, but small.toml has 200000: move" in message
    (folder / "pole/random/seed-0.json").unlink()
    message = refused(capsys, "experiment", "small.toml")
    assert "its record runs/small/pole/random/seed-0.json is missing, so its options are unknown" in message


OWN_OPTIONS = """\
seeds = {}

[tasks.pole]
env = "CartPole-v1"

[agents.small]
command = "train gtrxl"
config = "small-options.toml"
"""
SIZES = """\
total-timesteps = 64
episodes = 2
evaluation_episodes = 1
n_envs = 2
n_steps = 16
segment_length = 16
batch_size = 32
videos = false
quiet = true
core.layers = 1
core.width = 8
"""


@pytest.mark.usefixtures("runs_in_process")
@pytest.mark.parametrize("changed", ["", "stop_return = 300.0"])
def test_a_changed_file_of_options_is_refused(folder, capsys, changed):
    """Options without a value count, too: the words of the command stay the same."""
    Path("small.toml").write_text(OWN_OPTIONS.format(1))
    Path("small-options.toml").write_text(f"{SIZES}stop_return = 450.0\n")
    run(capsys)
    Path("small.toml").write_text(OWN_OPTIONS.format(2))
    Path("small-options.toml").write_text(SIZES + changed)
    message = refused(capsys, "experiment", "small.toml")
    assert "seed-0 was trained with stop_return = 450.0, but the options of small.toml, with those" in message


def test_outcomes_of_earlier_versions_have_no_options(tmp_path):
    job = Job(str(tmp_path / "seed-0"), "baseline random", ())
    Outcome(["baseline random"], 0).write(job)
    record = job.sibling("json")
    older = {name: value for name, value in json.loads(record.read_text()).items() if name != "options"}
    record.write_text(json.dumps(older))
    assert Outcome.read(job).options == "{}"


@pytest.mark.parametrize("content", ["[", "3", '{"runs": 3}', '{"runs": [{"task": []}]}', '{"runs": []}'])
def test_results_that_are_no_results_name_nothing(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    assert other_results(tmp_path, []) == []


@pytest.mark.usefixtures("runs_in_process")
def test_results_of_another_file_are_named(folder, capsys):
    run(capsys, "--tasks", "pole")
    Path("small.toml").write_text(
        FILE.replace("tasks.pole", "tasks.cart").replace("[tasks.missing]", "[tasks.none]")
    )
    with pytest.raises(SystemExit):
        main(["experiment", "small.toml"])
    error = capsys.readouterr().err
    assert "runs/small has results of pole/random, which small.toml does not name" in error


@pytest.mark.usefixtures("runs_in_process")
def test_results_of_seeds_that_the_file_no_longer_has_are_named(folder, capsys):
    run(capsys, "--tasks", "pole")
    Path("small.toml").write_text(FILE.replace("seeds = 2", "seeds = 1"))
    main(["experiment", "small.toml", "--tasks", "pole"])
    error = capsys.readouterr().err
    assert "runs/small has results of pole/random/seed-1, which small.toml does not name" in error


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "quiet = true",
            "quit = true",
            "agent random on task pole: unknown option --quit; did you mean --quiet?",
        ),
        ("episodes = 3", "episodes = 2.5", "agent random on task pole: episodes must be a whole number"),
        (
            "seeds = 2",
            "sees = 2",
            "small.toml, line 1: the file has an unknown key sees; did you mean seeds?",
        ),
        ("baseline random", "train", "Choose one of train gtrxl"),
    ],
)
def test_invalid_files_are_refused_before_anything_is_made(folder, capsys, old, new, message):
    Path("small.toml").write_text(FILE.replace(old, new))
    assert message in refused(capsys, "experiment", "small.toml")
    assert not folder.exists()


@pytest.mark.usefixtures("runs_in_process")
def test_a_part_of_an_experiment_is_trained_and_reported(folder, capsys):
    out = run(capsys, "--tasks", "pole", "--agents", "random")
    assert "2 runs, 0 of them complete" in out
    assert "missing" not in (folder / "table.md").read_text()
    assert "unknown task pol; did you mean pole?" in refused(
        capsys, "experiment", "small.toml", "--tasks", "pol"
    )


@pytest.mark.parametrize(
    "change",
    [None, {"seconds": "x"}, {"command": 3}, {"returncode": "x"}, {"options": "["}, {"options": "3"}],
)
def test_a_damaged_outcome_is_named(folder, capsys, change):
    job = Job(str(folder / "pole/random/seed-0"), "baseline random", ())
    Path(job.folder).mkdir(parents=True)
    Outcome(["baseline random"], 0).write(job)
    record = job.sibling("json")
    record.write_text("{" if change is None else json.dumps(json.loads(record.read_text()) | change))
    assert "seed-0.json is damaged" in refused(capsys, "experiment", "small.toml")


def test_files_of_the_user_are_not_replaced(folder, capsys):
    folder.mkdir(parents=True)
    (folder / "table.md").write_text("mine")
    message = refused(capsys, "experiment", "small.toml")
    assert "runs/small has table.md, which would be replaced, but was not made by this command" in message
    (folder / "table.md").unlink()
    (folder / "pole/random/seed-0").mkdir(parents=True)
    (folder / "pole/random/seed-0/notes.txt").write_text("mine")
    message = refused(capsys, "experiment", "small.toml", "--tasks", "pole")
    assert "seed-0 was not made by small.toml, or its record" in message
    assert (folder / "pole/random/seed-0/notes.txt").read_text() == "mine"


@pytest.mark.usefixtures("runs_in_process")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("evaluation.json", "{}", "evaluation.json cannot be read ('last')"),
        ("evaluation.json", '{"last": {"returns": [1, null]}}', "must have returns of at most 1e+100"),
        ("evaluation.json", '{"last": {"returns": [1, 1e308]}}', "must have returns of at most 1e+100"),
        ("evaluation.json", '{"last": {"returns": [1, 1%s]}}' % ("0" * 400), "beyond the range of float64"),
        ("evaluation.json", "", "remove the folder of the run to repeat it"),
    ],
)
def test_a_damaged_file_of_a_complete_run_is_named_before_the_first_training(
    folder, capsys, name, content, message
):
    selection = ["experiment", "small.toml", "--tasks", "pole"]
    main(selection)
    (folder / "pole/random/seed-1" / name).write_text(content)
    Path("small.toml").write_text(FILE.replace("seeds = 2", "seeds = 3"))
    assert message in refused(capsys, *selection)
    assert not (folder / "pole/random/seed-2").exists()


@pytest.mark.usefixtures("runs_in_process")
def test_a_damaged_log_costs_its_curve_only(folder, capsys):
    run(capsys, "--tasks", "pole")
    log = folder / "pole/random/seed-1/progress.csv"
    log.write_text("time/total_timesteps,eval/mean_reward\nnever,1\n")
    (folder / "table.md").unlink()
    main(["experiment", "small.toml", "--tasks", "pole"])
    assert "curves.png lacks this run: remove its folder to repeat it" in capsys.readouterr().err
    assert "| random | 2 of 2 |" in (folder / "table.md").read_text()
    assert (folder / "curves.png").exists()


def test_runs_that_cannot_be_started_are_failures(folder, capsys):
    (folder / "pole/random").mkdir(parents=True)
    for seed in (0, 1):
        (folder / f"pole/random/seed-{seed}.lock").symlink_to("nowhere")
    with pytest.raises(SystemExit) as exited:
        main(["experiment", "small.toml", "--tasks", "pole"])
    assert exited.value.code == 2
    assert "rlxf: 2 of 2 runs failed" in capsys.readouterr().err
    assert "| random | 0 of 2, 2 failed |" in (folder / "table.md").read_text()


def test_a_result_in_the_folder_of_another_machine_is_a_failure(tmp_path, capsys):
    report, job = _Progress(1), Job(str(tmp_path / "seed-0"), "baseline random", ())
    report(job, Outcome([], 0))
    assert "failed: its worker has finished it, but not in this folder" in capsys.readouterr().out
    assert report.errors.keys() == {job}


def test_workers_of_a_cluster_get_an_absolute_folder(folder, capsys):
    assert parse(["experiment", "small.toml", "--scheduler", "tcp://x:1"]).folder == folder
    words = ("experiment", "small.toml", "--scheduler", "tcp://x:1", "--processes", "2")
    assert "--processes is for this machine" in refused(capsys, *words)


@pytest.mark.parametrize("scheduler", [["--scheduler", "tcp://x:1"], []])
def test_runs_get_absolute_paths(folder, scheduler):
    """The options of the runs, which the next call compares, have the same paths with and without workers."""
    other = MAZE.format("", 'config = "own.toml"\npretrained = "runs/other"')
    Path("small.toml").write_text(other.replace('"MlpPolicy"', '"None"'))
    Path("own.toml").write_text("gamma = 0.5\n")
    work = parse(["experiment", "small.toml", *scheduler]).prepare()
    ((_, job),) = work.args[1]
    words = dict(pairwise(job.arguments))
    root = f"{Path.cwd()}/"
    assert (words["--config"], words["--pretrained"]) == (f"{root}own.toml", f"{root}runs/other")
    assert words["--policy"] == "None"
    written = json.loads(job.options)
    assert (written["pretrained"], written["gamma"]) == (f"{root}runs/other", 0.5)


def test_a_run_with_relative_paths_is_continued_with_absolute_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create("seed-0", {"env": "CartPole-v1", "pretrained": "runs/other"})
    options = json.dumps({"pretrained": "runs/other"})
    relative = ("--config", "own.toml", "--pretrained", "runs/other")
    Outcome(["train gtrxl", *relative], 0, options=options).write(Job(str(run.path), "train gtrxl", relative))
    paths = [str(tmp_path / name) for name in ("own.toml", "runs/other")]
    given = {"env": "CartPole-v1", "pretrained": paths[1]}
    words = ("--config", paths[0], "--pretrained", paths[1])
    check_same(Job(str(run.path), "train gtrxl", words, options=json.dumps(given)), given, Path("small.toml"))
    words = ("--config", str(tmp_path / "new.toml"), "--pretrained", paths[1])
    with pytest.raises(ValueError, match=r"new\.toml"):
        check_same(Job(str(run.path), "train gtrxl", words), given, Path("small.toml"))


def test_a_second_process_is_refused(folder, capsys):
    with only_process(folder):
        assert "another process works on the experiment" in refused(capsys, "experiment", "small.toml")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("output", ["small.toml", "small.toml/below/it"])
@pytest.mark.parametrize("command", ["experiment", "sweep"])
def test_a_file_is_no_folder_for_the_output(capsys, command, output):
    message = refused(capsys, command, "small.toml", "--output", output)
    assert message.startswith("rlxf: --output must be a folder, got the file small.toml: choose another one")


@pytest.mark.parametrize("option", ["--processes", "--threads"])
def test_counts_are_checked(folder, capsys, option):
    assert f"{option} must be at least 1" in refused(capsys, "experiment", "small.toml", option, "0")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser can write everywhere")
def test_a_folder_that_cannot_be_written_is_named(folder, capsys):
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    assert str(folder.name) in refused(capsys, "experiment", "small.toml")


@pytest.mark.parametrize(
    ("changes", "refused_name"),
    [
        ({}, None),
        ({"env": "CartPole-v1"}, None),
        ({"env": "evil:Env-v0"}, "env"),
        ({"env_kwargs": {"file": "/etc/x"}}, "env_kwargs"),
        ({"dataset": ["other/x-v0"]}, "dataset"),
        ({"trust_data": False}, "trust_data"),
    ],
)
def test_a_run_on_a_dataset_is_resumed_with_trust_in_its_own_task_only(tmp_path, changes, refused_name):
    words = ["train bc", "--dataset", "a/b-v0", "--trust-data"]
    options = read_options(["train", "bc", *words[1:]])
    assert needs_trust(options)
    job = Job(str(tmp_path / "seed-0"), words[0], tuple(words[1:]), trusted=True)
    Outcome(words, 143).write(job)
    RunFolder.create(Path(job.folder), options | {"agent": "behavior_cloning"} | changes)
    with pytest.raises(ValueError, match=f"has {refused_name} = ") if refused_name else nullcontext():
        check_same(job, options, Path("file.toml"))
