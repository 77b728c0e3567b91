"""Tests of ``--stop-return``: a training ends once an evaluation reaches a return, also if it is resumed."""

import os
import shlex
import signal
from pathlib import Path

import pytest

from rlxf import GTrXLPPO
from rlxf.cli import main
from rlxf.evaluation import TargetSweep, evaluate
from rlxf.training import RunFolder
from rlxf.training.strict_json import load_json_file
from tests.cli.running import death_expected, die, refused
from tests.cli.test_extend import BC, DT, ONLINE
from tests.datasets import record_cartpole

pytestmark = pytest.mark.usefixtures("in_foreground")

CASES = {
    "gtrxl": ([*ONLINE, *shlex.split("--total-timesteps 160 --evaluate-every 50")], 50),
    "dt": ([*DT, *shlex.split("--updates 9 --evaluate-every 2")], 2),
    "bc": ([*BC, *shlex.split("--updates 9 --evaluate-every 2")], 2),
}
"""Name -> words of a training, and steps between its evaluations."""


@pytest.fixture(autouse=True)
def data(minari_root):
    record_cartpole(range(1, 13))


@pytest.fixture(autouse=True)
def rising(monkeypatch):
    """The first evaluation of each training has a mean return of 1, the second one of 2, and so on."""

    def rise(agent, *args, **options):
        found = evaluate(agent, *args, **options)
        number = agent.num_timesteps / (50 if isinstance(agent, GTrXLPPO) else 2)
        for report in found.reports.values() if isinstance(found, TargetSweep) else [found]:
            report.returns[:] = number
        return found

    monkeypatch.setattr("rlxf.evaluation.callback.evaluate", rise)


def train(case, run, *words):
    main([*CASES[case][0], "--stop-return", "2", *words, "--run", run])
    return RunFolder.open(run)


@pytest.mark.parametrize("case", CASES)
def test_the_training_ends_with_the_evaluation_that_reaches_the_return(case, capsys):
    run = train(case, "early")
    step = 2 * CASES[case][1]
    assert (run.completion.steps, run.completion.ended_early) == (step, True)
    assert f"reached --stop-return 2: the training ended after {step:,} of " in capsys.readouterr().out
    assert run.final_checkpoint.read_bytes() == run.best.read_bytes(), "the last weights are the best ones"


def test_a_return_that_is_not_reached_changes_nothing():
    one, other = (
        train("gtrxl", "one", "--stop-return", "99"),
        train("gtrxl", "other", "--stop-return", "None"),
    )
    assert one.final_checkpoint.read_bytes() == other.final_checkpoint.read_bytes()
    assert one.completion == other.completion
    assert not one.completion.ended_early


@pytest.mark.parametrize("case", CASES)
def test_a_run_killed_after_the_evaluation_ends_at_the_same_step(case):
    whole = train(case, "whole")
    with death_expected(die):
        train(case, "cut")
    main(["resume", "cut", "--no-progress-bar"])
    for name in ("checkpoint.zip", "best.zip"):
        assert (whole.path / name).read_bytes() == Path("cut", name).read_bytes(), name
    assert load_json_file("cut/completed.json") == load_json_file("whole/completed.json")


@pytest.mark.parametrize("case", ["gtrxl", "bc"])
def test_a_run_stopped_during_the_last_evaluation_is_not_trained_further(case, monkeypatch):
    def interrupt(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    whole = train(case, "whole")
    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.reports.evaluate", interrupt)
        with pytest.raises(SystemExit) as exit_info:
            train(case, "cut")
    assert exit_info.value.code == 75
    main(["resume", "cut", "--no-progress-bar"])
    assert whole.final_checkpoint.read_bytes() == Path("cut/checkpoint.zip").read_bytes()
    assert load_json_file("cut/completed.json") == load_json_file("whole/completed.json")


def test_data_are_not_loaded_if_no_update_is_left(monkeypatch):
    train("dt", "run")
    Path("run/completed.json").unlink()
    monkeypatch.setattr("rlxf.cli.offline_training.load_trajectories", lambda *_, **__: die())
    main(["resume", "run", "--no-progress-bar"])
    assert RunFolder.open("run").completion.ended_early


def test_a_complete_run_is_not_trained_further(capsys):
    train("gtrxl", "run")
    before = Path("run/checkpoint.zip").read_bytes()
    main(["resume", "run"])
    assert "run is complete: 100 steps" in capsys.readouterr().out
    message = refused(capsys, "resume", "run", "--total-timesteps", "999")
    assert "run ended after 100 steps, because an evaluation reached its --stop-return" in message
    assert Path("run/checkpoint.zip").read_bytes() == before


def test_a_run_killed_before_its_marker_cannot_be_extended(capsys):
    train("bc", "run")
    Path("run/completed.json").unlink()
    assert "run ended after 4 updates" in refused(capsys, "resume", "run", "--updates", "99")
    assert RunFolder.open("run").config["updates"] == 9


def test_an_agent_is_not_evaluated_before_its_first_update():
    """A return that is reached without training ends the run after the first update, with files."""
    run = train("gtrxl", "run", "--evaluate-every", "25", "--stop-return", "0.5")
    assert run.completion.steps == 50
    assert run.best.read_bytes() == run.final_checkpoint.read_bytes()


@pytest.mark.parametrize(
    ("case", "words", "message"),
    [
        ("gtrxl", "--stop-return nan", "--stop-return must be a finite number or None, got nan"),
        (
            "gtrxl",
            "--evaluate-every 0",
            "--stop-return needs evaluations during training, got --evaluate-every 0",
        ),
        (
            "bc",
            "--evaluate-every 0",
            "--stop-return needs evaluations during training, got --evaluate-every 0",
        ),
        ("bc", "--stop-return inf", "--stop-return must be a finite number or None, got inf"),
        ("dt", "--evaluate-every None --episodes 0", "--stop-return needs evaluations during training"),
    ],
)
def test_invalid_options_are_one_line(case, words, message, capsys):
    arguments = [*CASES[case][0], "--stop-return", "2", *words.split(), "--run", "run"]
    assert message in refused(capsys, *arguments)
    assert not Path("run").exists()


def test_baselines_end_early_too(capsys):
    words = "baseline ppo --env CartPole-v1 --total-timesteps 300 --evaluate-every 50 --episodes 2 --run run"
    options = ["--arguments", '{"n_steps": 64}', "--stop-return", "50", "--evaluation-episodes", "2"]
    main([*words.split(), *options])
    assert RunFolder.reopen("run").completion.steps == 100, "the second evaluation has a mean return of 50"
    assert "needs evaluations" in refused(capsys, *words.split(), *options, "--evaluate-every", "0")


def test_commands_in_messages_are_quoted_for_a_shell(capsys):
    train("bc", "my run", "--episodes", "0", "--stop-return", "None", "--evaluate-every", "None")
    assert "run: rlxf evaluate 'my run'" in capsys.readouterr().out
