"""Tests of ``rlxf distill``: files of a run, and errors."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.attention import KNNLM
from rlxf.cli import main
from rlxf.cli.commands.distill import Distill
from rlxf.training import RunFolder
from tests.cli.running import TINY, change_config, refused, train
from tests.datasets import ID, record_cartpole
from tests.ranks import on_ranks

QUIET = ["--no-progress-bar"]


@pytest.fixture
def offline(minari_root):
    """Folder of a run of a Decision Transformer."""
    record_cartpole()
    sizes = shlex.split("--context-length 4 --batch-size 4 --core.width 16 --core.layers 2 --core.heads 2")
    main(["train", "dt", "--dataset", ID, "--updates", "2", "--episodes", "2", "--run", "dt", *sizes, *QUIET])
    return Path("dt")


def test_distill_a_decision_transformer(offline):
    main(["distill", str(offline), "--steps", "3", "--layers", "1", "--seed", "5", *QUIET])
    student = DecisionTransformer.load("dt-student/checkpoint.zip", device="cpu")
    assert (student.core.width, student.core.layers, student.core.heads) == (8, 1, 2)
    assert (student.num_timesteps, student.context_length, student.seed) == (3, 4, 5)
    config = json.loads(Path("dt-student", "config.json").read_text())
    assert (config["agent"], config["teacher"]) == ("decision_transformer", "dt")
    assert RunFolder.open("dt-student").completion.steps == 3
    main(["evaluate", "dt-student", "--episodes", "2", "--n-envs", "2", *QUIET])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("actor", ["student", "teacher"])
def test_distill_a_gtrxl(actor):
    train("--run", "maze", "--normalize-observations")
    main(["distill", "maze", "--run", "small", "--steps", "32", "--actor", actor, *QUIET])
    student = GTrXLPPO.load("small/checkpoint.zip", device="cpu")
    assert (student.core.width, student.num_timesteps) == (4, 32)
    teacher, student = (Path(run, "normalizer.zip").read_bytes() for run in ("maze", "small"))
    assert student == teacher, "the student should have the normalization of its teacher"
    main(["evaluate", "small", "--episodes", "2", "--n-envs", "2", *QUIET])


def test_feed_forward_width_changes_in_proportion_to_the_width():
    train("--run", "wide", "--core.feed-forward", "24")
    for width, expected in (([], 12), (["--width", "8"], 24)):
        run = f"student-{expected}"
        main(["distill", "wide", "--run", run, "--steps", "32", *width, *QUIET])
        assert GTrXLPPO.load(f"{run}/checkpoint.zip", device="cpu").core.feed_forward == expected


def test_progress_counts_whole_rollouts(capsys):
    train("--run", "teacher")
    capsys.readouterr()
    main(["distill", "teacher", "--run", "rounded", "--steps", "33"])
    assert set(re.findall(r"steps [\d,]+/([\d,]+)", capsys.readouterr().out)) == {"64"}


def test_errors_are_one_line_and_no_folder_is_created(offline, capsys):
    for args, message in (
        (["dt", "--steps", "0"], "steps must be at least 1, got 0"),
        (["dt", "--temperature", "0"], "temperature must be above 0, got 0"),
        (["dt", "--steps", "1", "--width", "0"], "width must be at least 1, got 0"),
        (["dt", "--steps", "1", "--layers", "0"], "layers must be at least 1, got 0"),
        (["dt", "--steps", "1", "--heads", "0"], "heads must be at least 1, got 0"),
        (["dt", "--heads", "3"], "heads must divide width"),
        (
            ["dt", "--steps", "1", "--actor", "teacher"],
            "--actor applies to GTrXLPPO only, got teacher",
        ),
        (["nowhere"], "there is no run folder nowhere"),
        (["dt", "--run", "dt"], "dt exists"),
    ):
        assert message in refused(capsys, "distill", *args)
    assert not Path("dt-student").exists()


def test_teachers_without_a_target_are_refused_before_a_run_is_made(minari_root, capsys):
    record_cartpole()
    options = shlex.split("--updates 2 --episodes 0 --context-length 4 --batch-size 4 --no-progress-bar")
    sizes = shlex.split("--core.width 8 --core.layers 1")
    main(["train", "dt", "--dataset", ID, "--run", "max", "--conditioning", "max-return", *options, *sizes])
    assert "distill needs agents that act for a target return" in refused(capsys, "distill", "max")
    assert not Path("max-student").exists()


def test_the_teacher_may_be_the_working_folder(offline, capsys, monkeypatch):
    monkeypatch.chdir("dt")
    assert "steps must be at least 1" in refused(capsys, "distill", ".", "--steps", "0")
    assert Distill(teacher=Path())._path.name == "dt-student"


def test_configurations_of_teachers_are_checked(offline, capsys):
    train("--run", "maze")
    for run, changes, message in (
        ("maze", {"n_envs": 10**8}, "maze/config.json needs too much memory"),
        ("maze", {"n_envs": "2"}, "maze/config.json has n_envs = '2', which must be an integer"),
        ("maze", {"n_envs": None}, "'n_envs' is missing in its config.json"),
        ("dt", {"dataset": 5}, "dt/config.json has dataset = 5, which must be a list of Minari ids"),
        ("dt", {"dataset": None}, "dt/config.json has dataset = None, which must be a list of Minari ids"),
    ):
        change_config(Path(run), **changes)
        assert message in refused(capsys, "distill", run, "--steps", "16")
        assert not Path(f"{run}-student").exists()


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("agent", [DecisionTransformer, GTrXLPPO])
def test_teachers_with_a_datastore_are_rejected(agent, offline, capsys):
    if agent is GTrXLPPO:
        main(["train", "gtrxl", "--env", "CartPole-v1", *TINY, "--run", "cartpole"])
    run = offline if agent is DecisionTransformer else Path("cartpole")
    agent.load(run / "checkpoint.zip", device="cpu").attach_datastore(ID, KNNLM(k=1)).save(
        run / "checkpoint.zip"
    )
    assert "call the teacher's detach_datastore() first" in refused(
        capsys, "distill", str(run), "--steps", "16"
    )
    assert not Path(f"{run}-student").exists()


def test_several_processes_are_rejected(capfd):
    assert on_ranks(2, lambda: main(["distill", "teacher"])) == ["SystemExit: 2"] * 2
    assert "rlxf distill supports a single process, got 2" in capfd.readouterr().err
