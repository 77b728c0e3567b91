"""Tests of runs below folders, their tasks and settings, and the groups and labels that follow."""

import json
import os
import warnings

import pytest

from rlxf.experiments.groups import Group, choose_metric, make_labels, parse_patterns, read_groups
from rlxf.experiments.runs import find_runs, group_name, settings_of, task_of
from rlxf.training import RunFolder
from tests.experiments.logs import write_evaluations, write_monitor, write_run

EVAL = "eval/mean_reward"


@pytest.fixture(autouse=True)
def _no_other_warnings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def groups(*paths, metric=EVAL, patterns=None):
    return read_groups(find_runs(paths), metric, patterns)


def summary(found):
    return [(group.task, group.label, len(group.curves)) for group in found]


# Runs


def test_runs_are_found_in_subfolders_and_not_inside_of_runs():
    write_run("all/b/run-1", seed=1)
    write_run("all/a/run-0")
    write_run("all/a/run-0/nested")
    write_monitor("all/c/0.monitor.csv", [1, 2])
    (write_run("all/d").parent / "notes.csv").write_text("step,x\n1,2\n")
    found = find_runs(["all"])
    assert [run.path.as_posix() for run in found] == ["all/a/run-0", "all/b/run-1", "all/c", "all/d"]
    assert [run.seed for run in found] == [0, 1, None, 0]
    assert [run.unit for run in found] == ["environment steps"] * 4
    assert [run.finished for run in found] == [True, True, None, True]


def test_a_log_above_runs_does_not_hide_them():
    write_run("runs/a/seed-0")
    write_run("runs/b", seed=1)
    write_monitor("runs/monitor.csv", [1, 2])
    with pytest.warns(
        UserWarning, match=r"runs has a log and runs below it \(runs/a/seed-0, runs/b\)"
    ) as shown:
        found = find_runs(["runs"])
    assert [run.path.as_posix() for run in found] == ["runs", "runs/a/seed-0", "runs/b"]
    assert len(shown) == 1


def test_a_run_that_is_given_twice_counts_once():
    write_run("all/run-0")
    with pytest.warns(UserWarning, match="all/run-0 is given twice, and counts once"):
        assert len(find_runs(["all", "all/run-0"])) == 1


@pytest.mark.parametrize("path", ["missing", "empty", "notes.txt"])
def test_paths_without_runs_are_refused(tmp_path, path):
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("step,x\n")
    message = {"missing": "there is no run", "empty": "contains no run", "notes.txt": "is not a log"}[path]
    with pytest.raises((ValueError, OSError), match=message):
        find_runs([path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "contains a list"),
        ("{", "cannot be read"),
        ("[" * 10**5, "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_damaged_settings_are_refused(text, message):
    (write_run("run") / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"run/config.json {message}"):
        find_runs(["run"])


@pytest.mark.parametrize("value", [None, 5, [], {"a": {"b": 1}}, "x", True])
@pytest.mark.parametrize("key", ["env", "env_kwargs", "dataset", "seed", "agent", "updates", "core"])
def test_any_json_value_is_accepted(key, value):
    write_run("run", **{key: value})
    (group,) = groups("run")
    assert isinstance(group.label, str)
    assert isinstance(group.task, str)


def test_links_and_pipes_are_not_followed(tmp_path):
    write_run("elsewhere/run-0")
    (tmp_path / "all").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "all" / "link")
    os.mkfifo(tmp_path / "all" / "progress.csv")
    with pytest.raises(FileNotFoundError, match="contains no run"):
        find_runs(["all"])


def test_a_run_without_its_marker_is_unfinished_and_one_with_a_checkpoint_is_not():
    assert find_runs([write_run("a", finished=False)])[0].finished is False
    (write_run("b", finished=False) / "checkpoint.zip").touch()
    assert find_runs(["b"])[0].finished is True


def test_an_interrupted_distillation_is_unfinished():
    for name, finished in (("cut", False), ("whole", True)):
        (write_run(name, finished=finished, teacher="runs/teacher") / "checkpoint.zip").touch()
        assert find_runs([name])[0].finished is finished


def test_an_interrupted_run_is_unfinished_although_it_saved_its_agent():
    run = write_run("a", finished=False)
    (run / "checkpoint.zip").touch()
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-000000020000.zip").touch()
    assert RunFolder(run, {}).resume_checkpoints.files()
    assert find_runs(["a"])[0].finished is False


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"env": "A-v0"}, "A-v0"),
        ({"env": "A-v0", "env_kwargs": {"y": 2, "x": "z"}}, "A-v0, x=z, y=2"),
        ({"env": "A-v0", "dataset": ["a/b-v0", "c/d-v0"]}, "a/b-v0 + c/d-v0"),
        ({"dataset": ["a/b-v0"], "env": None}, "a/b-v0"),
        ({}, ""),
        ({"env": "A-v0\x1b[31m\n\u202e"}, "A-v0\\x1b[31m \\u202e"),
    ],
)
def test_task_of_a_configuration(config, task):
    assert task_of(config) == task


def test_long_tasks_are_cut_and_stay_different():
    tasks = [task_of({"env": "A-v0", "env_kwargs": {"map": "x" * 10**5, "z": each}}) for each in (1, 2)]
    assert tasks[0] != tasks[1]
    assert max(map(len, tasks)) == 120


def test_settings_are_flat_and_without_seeds():
    config = {"env": "A-v0", "seed": 3, "device": "cuda", "core": {"memory": {"name": "XL", "length": 8}}}
    config |= {"name": "x", "hidden_sizes": [1, 2], "arguments": {}, "track": "wandb", "baselines": True}
    assert settings_of(config) == {
        "core.memory": "XL",
        "core.memory.length": 8,
        "name": "x",
        "hidden_sizes": "[1, 2]",
    }


def test_links_and_pipes_in_runs_and_large_settings_are_refused():
    run = write_run("run")
    for make, message in ((os.mkfifo, "neither a file nor"), (lambda x: os.symlink("run/x", x), "symbolic")):
        make("run/completed.json.new")
        with pytest.raises(ValueError, match=message):
            find_runs(["run"])
        os.unlink("run/completed.json.new")
    config = json.loads((run / "config.json").read_text()) | {"stages": [[]] * 100_000}
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has more than 262,144 bytes"):
        find_runs(["run"])


def test_the_environment_of_an_offline_run_is_a_setting():
    """Runs on the same data may be evaluated in different environments."""
    config = {"dataset": ["a/b-v0"], "env": "A-v0", "env_kwargs": {"x": 1}}
    assert settings_of(config) == {"env": "A-v0", "env_kwargs.x": 1}


def test_a_return_that_ends_the_training_is_a_setting():
    assert settings_of({"env": "A-v0", "stop_return": 5.0}) == {"stop_return": 5.0}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("logs/ppo/CartPole-v1_1", "ppo/CartPole-v1"),
        ("results/ppo-12", "results/ppo"),
        ("results/ppo_seed_3", "results/ppo"),
        ("results/seed0", "results"),
        ("ppo-0/monitor.csv", "ppo"),
        ("a/ppo/0.monitor.csv", "ppo"),
        ("a/lr-0.001", "a/lr-0.001"),
        ("a/CartPole-v1", "a/CartPole-v1"),
        ("a/run-1.csv", "a"),
    ],
)
def test_names_of_groups_without_settings(tmp_path, path, name):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch() if file.suffix == ".csv" else file.mkdir()
    assert group_name(file).removeprefix(f"{tmp_path.name}/") == name


# Groups


def test_runs_that_differ_by_the_seed_are_one_group():
    for seed in range(3):
        write_run(f"runs/a-{seed}", seed=seed, checkpoint_seconds=seed, device=f"cuda:{seed}")
        write_run(f"runs/b-{seed}", seed=seed, n_envs=8)
    assert summary(groups("runs")) == [
        ("CartPole-v1", "gtrxl, n_envs=4", 3),
        ("CartPole-v1", "gtrxl, n_envs=8", 3),
    ]


def test_tasks_have_groups_of_their_own_with_the_same_labels():
    write_run("runs/a", env="A-v0")
    write_run("runs/b", env="B-v0", env_kwargs={"length": 3})
    write_run("runs/c", dataset=["c/d-v0"], updates=5)
    found = groups("runs")
    assert [group.task for group in found] == ["A-v0", "B-v0, length=3", "c/d-v0"]
    assert found[0].label == found[1].label
    assert [group.unit for group in found] == ["environment steps", "environment steps", "updates"]


def test_unfinished_runs_are_counted():
    write_run("runs/a", seed=0)
    write_run("runs/b", seed=1, finished=False)
    assert [group.unfinished for group in groups("runs")] == [1]


def test_a_killed_run_does_not_shorten_the_line_of_finished_runs():
    solved = write_run("runs/a", (1.0, 9.0), seed=0, stop_return=8)
    (solved / "completed.json").write_text('{"steps": 200, "ended_early": true, "sha256": {}}')
    write_run("runs/b", (1.0,), seed=1, finished=False, stop_return=8)
    write_run("runs/c", (1.0, 2.0, 3.0), seed=2, stop_return=8)
    (whole,) = groups("runs")
    assert [curve.steps[-1] for curve in whole.curves] == [200, 100, 300]
    finished = whole.finished_only()
    assert [curve.steps[-1] for curve in finished.lines(EVAL)] == [300, 300]
    assert (finished.unfinished, finished.left_out, whole.left_out) == (1, 1, 0)
    assert finished.finished_only() == finished


def test_killed_runs_have_a_line_if_no_run_finished():
    for seed in range(2):
        write_run(f"runs/{seed}", (1.0, 2.0), seed=seed, finished=False)
    (group,) = groups("runs")
    assert group.finished_only() is group


def test_a_run_that_ended_early_keeps_its_last_value():
    solved = write_run("runs/a", (1.0, 9.0), seed=0, stop_return=8)
    write_run("runs/b", (1.0, 2.0, 3.0, 4.0), seed=1, stop_return=8)
    write_run("runs/c", (1.0, 5.0), seed=2, stop_return=8, finished=False)
    (solved / "completed.json").write_text('{"steps": 250, "ended_early": true, "sha256": {}}')
    (group,) = groups("runs")
    lines = group.lines("eval/mean_reward")
    assert [each.values.tolist() for each in lines] == [[1, 9, 9], [1, 2, 3, 4], [1, 5]]
    assert [each.steps[-1] for each in lines] == [400, 400, 200]
    smooth = group.smooth(2).lines("eval/mean_reward")[0]
    assert smooth.values.tolist() == [1, 5, 5]
    assert group.lines("train/loss") == group.curves
    assert [len(each.steps) for each in group.curves] == [2, 4, 2]  # what rlxf compare uses


def test_a_run_whose_weights_were_removed_or_whose_marker_is_damaged_is_read():
    copied, damaged = (write_run(f"runs/{name}", seed=seed) for seed, name in enumerate("ab"))
    digests = '{"checkpoint.zip": "00"}'  # the file is missing
    (copied / "completed.json").write_text(f'{{"steps": 250, "ended_early": true, "sha256": {digests}}}')
    (damaged / "completed.json").write_text('{"steps": 1, "ended_early": true, "sha256": [[1, 2]]}')
    (group,) = groups("runs")
    assert list(group.ended_early) == [True, False]


def test_equal_seeds_cause_a_warning():
    write_run("runs/a", seed=1)
    write_run("runs/b", seed=1)
    with pytest.warns(UserWarning, match=r"runs/a \(seed 1\), runs/b \(seed 1\) are in one group"):
        assert len(groups("runs")) == 1


def test_logs_without_settings_are_grouped_by_name_with_a_warning():
    for seed in (1, 2):
        write_monitor(f"logs/ppo/CartPole-v1_{seed}/0.monitor.csv", [1, 2])
        write_monitor(f"logs/dqn/CartPole-v1_{seed}/0.monitor.csv", [3, 4])
    with pytest.warns(UserWarning, match="have no config.json, and count as seeds of one method"):
        found = groups("logs", metric="r")
    assert summary(found) == [("CartPole-v1", "dqn/CartPole-v1", 2), ("CartPole-v1", "ppo/CartPole-v1", 2)]


def test_patterns_name_groups():
    for name in ("ppo", "dqn"):
        for width in (64, 128):
            write_evaluations_in(f"logs/{name}_{width}")
    patterns = parse_patterns(["small=*_64", "PPO=*/ppo_128"])
    found = read_groups(find_runs(["logs"]), EVAL, patterns)
    assert summary(found) == [("", "logs/dqn", 1), ("", "small", 2), ("", "PPO", 1)]


@pytest.mark.parametrize("form", ["{agent}/{env}_1", "{env}/{agent}_1", "{agent}_{env}_1"])
def test_a_named_group_of_several_environments_causes_a_warning(form):
    for agent in ("ppo", "dqn"):
        for env in ("CartPole-v1", "Pendulum-v1"):
            write_evaluations_in(f"logs/{form.format(agent=agent, env=env)}")
    runs = find_runs(["logs"])
    read_groups(runs, EVAL, {"*CartPole-v1*": "cart", "*Pendulum-v1*": "pendulum"})
    with pytest.warns(UserWarning, match=r"PPO seems to mix tasks, .*\) name CartPole-v1, Pendulum-v1"):
        read_groups(runs, EVAL, {"*ppo*": "PPO", "*CartPole-v1*": "cart"})


def write_evaluations_in(folder):
    os.makedirs(folder)
    return write_evaluations(f"{folder}/evaluations.npz", [[1, 2]])


@pytest.mark.parametrize("text", ["name", "=x", "name=", ""])
def test_patterns_have_a_name(text):
    with pytest.raises(ValueError, match="--groups must be NAME=PATTERN"):
        parse_patterns([text])


def test_a_pattern_occurs_once():
    with pytest.raises(ValueError, match=r"--groups has the pattern \*a twice, for one and two"):
        parse_patterns(["one=*a", "two=*a"])


def test_a_pattern_must_match():
    write_run("runs/a")
    with pytest.raises(ValueError, match="--groups x=b matches no run, such as runs/a"):
        groups("runs", patterns={"b": "x"})


def test_runs_without_the_metric_are_left_out():
    write_run("runs/a")
    write_run("runs/b", values=())
    (write_run("runs/c") / "progress.csv").unlink()
    (write_run("runs/d") / "progress.csv").write_text("time/total_timesteps,train/loss\n1,2\n")
    with pytest.warns(UserWarning, match="runs left out") as shown:
        assert len(groups("runs")) == 1
    assert [str(each.message) for each in shown] == [
        "runs left out, because nothing was logged yet: runs/c",
        f"runs left out, because there is no value of {EVAL}: runs/b, runs/d",
    ]


def test_runs_without_any_value_are_refused():
    write_run("runs/a", values=())
    with (
        pytest.warns(UserWarning, match="runs left out"),
        pytest.raises(ValueError, match="no run has a value of eval/mean_reward"),
    ):
        groups("runs")


# Metric


def test_the_default_metric_is_one_that_all_runs_have():
    write_run("runs/a")
    assert choose_metric(find_runs(["runs"])) == EVAL
    write_monitor("runs/b/monitor.csv", [1])
    assert choose_metric(find_runs(["runs"])) == "rollout/ep_rew_mean"
    (write_run("runs/c") / "progress.csv").write_text(f"time/total_timesteps,{EVAL}\n1,2\n")
    assert choose_metric(find_runs(["runs"])) == EVAL
    assert choose_metric(find_runs(["runs/b"]), "r") == "r"


def test_a_missing_metric_lists_the_existing_ones():
    write_run("runs/a")
    write_monitor("runs/b/monitor.csv", [1])
    with pytest.raises(
        ValueError, match=r"none of the 2 runs has the metric x; the metrics are eval/mean_rew.*, r"
    ):
        choose_metric(find_runs(["runs"]), "x")
    with pytest.raises(
        ValueError, match=r"runs/a does not have the metric rollout/x.* did you mean rollout/ep"
    ):
        choose_metric(find_runs(["runs/a"]), "rollout/x_rew_mean")
    (write_run("empty") / "progress.csv").write_text("")
    with pytest.raises(ValueError, match=r"empty does not have the metric eval.*: nothing was logged yet"):
        choose_metric(find_runs(["empty"]))


# Labels


def labels(*configs):
    return make_labels([settings_of(config) for config in configs], ["task"] * len(configs))


def test_a_group_that_has_the_name_of_an_agent_is_not_compared_with_its_runs():
    agent = {"agent": "gtrxl", "a": 1, "b": 2}
    assert make_labels([agent, {"group": "gtrxl"}, {"group": "own"}], ["task"] * 3) == [
        *("gtrxl #1", "gtrxl #2", "own")
    ]


GRU = {"name": "GRU", "width": 8}


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ([{"agent": "gtrxl", "a": 1}], ["gtrxl"]),
        ([{"agent": "gtrxl", "a": 1}, {"agent": "ppo", "b": 2}], ["gtrxl", "ppo"]),
        (
            [{"agent": "gtrxl", "core": {"recurrence": each}} for each in (GRU, None)],
            ["gtrxl, core.recurrence=GRU", "gtrxl, core.recurrence=none"],
        ),
        (
            [{"agent": "gtrxl", "core": {"recurrence": GRU | {"width": each}}} for each in (8, 16)],
            ["gtrxl, core.recurrence.width=8", "gtrxl, core.recurrence.width=16"],
        ),
        (
            [{"agent": "x", "on": True, "lr": "0.1"}, {"agent": "x", "on": False, "lr": 0.2}],
            ["x, on=on, lr=0.1", "x, on=off, lr=0.2"],
        ),
        ([{"a": 1}, {"a": 2}], ["run, a=1", "run, a=2"]),
        ([{"agent": "x"}, {"agent": "x", "a": 0}], ["x, a=none", "x, a=0"]),
        ([{"agent": "x"}, {"agent": "x", "new": None}], ["x", "x"]),
    ],
    ids=range(8),
)
def test_labels_name_what_differs(configs, expected):
    assert labels(*configs) == expected


def test_labels_do_not_name_what_differs_from_task_to_task():
    settings = [
        {"agent": "gtrxl", "steps": steps, "width": width} for steps, width in ((5, 8), (9, 8), (9, 16))
    ]
    assert make_labels(settings[:2], ["a", "b"]) == ["gtrxl", "gtrxl"]
    assert make_labels(settings, ["a", "b", "b"]) == ["gtrxl, width=8", "gtrxl, width=8", "gtrxl, width=16"]
    same_text = make_labels([{"a": "1"}, {"a": 1}, {"a": 1}], ["a", "a", "b"])
    assert same_text == ["run #1", "run #2", "run"]


def test_labels_are_short_unique_and_printable():
    many = [{"agent": "x" * 30, **{f"setting_{i}": i + shift for i in range(20)}} for shift in (0, 1)]
    found = labels(*many, {"agent": "evil\n\x1b[31m"})
    assert len(set(found)) == 3
    assert all(len(label) < 85 and label.isprintable() for label in found)
    assert "and 1" in found[0]
    same_text = labels({"agent": "x", "a": "1"}, {"agent": "x", "a": 1})
    assert len(set(same_text)) == 2


def test_long_values_are_cut():
    found = labels({"agent": "x", "a": [0] * 1000}, {"agent": "x", "a": [1] * 1000}, {"agent": "y" * 1000})
    assert max(map(len, found)) < 85
    assert len(set(found)) == 3


def test_groups_can_be_made_of_plain_values():
    from rlxf.experiments.curves import Curve

    group = Group("a", "task", [Curve.of_points([1, 2], [3, 5])], unfinished=1)
    assert group.smooth(2).curves[0].values.tolist() == [3, 4]
    assert group.smooth(2).unfinished == 1
    assert json.dumps(group.label) == '"a"'
