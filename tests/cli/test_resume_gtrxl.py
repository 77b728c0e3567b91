"""Tests of ``rlxf resume`` for online runs: an interrupted run ends like an uninterrupted one."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import GTrXLPPO
from rlxf.cli import main
from rlxf.cli.commands.train_gtrxl import TrainGTrXL
from rlxf.cli.entry_point import parse
from rlxf.evaluation import EvaluationCallback
from rlxf.training import RunFolder
from tests.cli.running import death_expected, die, refused
from tests.cli.test_resume import rows, scalars

pytestmark = pytest.mark.usefixtures("in_foreground")

ROLLOUT, ROLLOUTS = 2 * 16, 6
TINY = shlex.split(
    f"--env CartPole-v1 --total-timesteps {ROLLOUT * ROLLOUTS} --episodes 3 --evaluate-every 50"
    " --n-envs 2 --n-steps 16 --segment-length 8 --batch-size 16 --n-epochs 2 --checkpoint-seconds 0"
    " --no-progress-bar"
    " --normalize-observations --normalize-rewards --evaluation-episodes 2 --memory-every 2"
    " --attention-maps-every 4 --histograms-every 1 --no-videos"
    " --core.width 8 --core.layers 1 --core.memory.length 8"
)
TIME_DEPENDENT = ("time/fps", "time/time_elapsed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("trained") / "whole"
    main(["train", "gtrxl", *TINY, "--run", str(folder)])
    return folder


@pytest.fixture
def whole(trained):
    """Copy of the uninterrupted run."""
    shutil.copytree(trained, "whole")
    return RunFolder.open("whole")


@pytest.fixture
def at_update(monkeypatch):
    """Function that calls an action once, before the update after a rollout."""
    train = GTrXLPPO.train

    def arrange(number, actions):
        def watched(self):
            if self.iterations == number and actions:
                actions.pop()()
            train(self)

        monkeypatch.setattr(GTrXLPPO, "train", watched)

    return arrange


def lines(run):
    return [{key: value for key, value in row.items() if key not in TIME_DEPENDENT} for row in rows(run)]


def histograms(run):
    """Return step, minimum, maximum and sum of each histogram, by tag."""
    events = EventAccumulator(str(run), {"histograms": 0}).Reload()
    result = {}
    for tag in events.Tags()["histograms"]:
        values = [(each.step, each.histogram_value) for each in events.Histograms(tag)]
        result[tag] = [(step, value.min, value.max, value.sum) for step, value in values]
    return result


def header(run):
    return (run / "progress.csv").read_text().splitlines()[0]


def assert_same_runs(one, other):
    for name in ("checkpoint.zip", "normalizer.zip", "best.zip", "best-normalizer.zip"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert header(one) == header(other)
    assert scalars(one) == scalars(other)
    assert histograms(one) == histograms(other)
    assert lines(one) == lines(other)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("number", [2, 5])
def test_a_killed_run_ends_like_an_uninterrupted_one(whole, at_update, number):
    at_update(number, [die])
    with death_expected():
        main(["train", "gtrxl", *TINY, "--run", "cut"])
    assert not Path("cut/checkpoint.zip").exists()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_run_that_another_process_trains_is_refused(whole, at_update):
    """The run that is trained, and later its resumption, are not disturbed."""
    command = [sys.executable, "-m", "rlxf", "resume", "cut", "--no-progress-bar"]
    results = []

    def resume():
        results.append(subprocess.run(command, cwd=Path.cwd(), capture_output=True, text=True, check=False))
        os.kill(os.getpid(), signal.SIGTERM)

    at_update(3, [resume])
    with pytest.raises(SystemExit):
        main(["train", "gtrxl", *TINY, "--run", "cut"])
    at_update(5, [resume])
    with pytest.raises(SystemExit):
        main(["resume", "cut", "--no-progress-bar"])
    for result in results:
        assert result.stderr == "rlxf: another process trains in cut: wait until it ends, or stop it\n"
        assert result.returncode == 2
    assert len(results) == 2
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_stops_the_run_after_the_current_update(whole, at_update, capsys, name):
    at_update(3, [lambda: os.kill(os.getpid(), getattr(signal, name))])
    with pytest.raises(SystemExit) as left:
        main(["train", "gtrxl", *TINY, "--run", "cut"])
    assert left.value.code == 75
    assert f"stopped by {name}; resume with: rlxf resume cut" in capsys.readouterr().err
    newest = RunFolder.reopen("cut").resume_checkpoints.newest()
    assert GTrXLPPO.load(newest, device="cpu").num_timesteps == 3 * ROLLOUT
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("number", [1, 3])
def test_a_signal_ends_an_evaluation_at_its_next_step(whole, monkeypatch, capsys, number):
    """The resumed run repeats the evaluation with the weights and statistics of its step."""
    evaluated, evaluate = [], EvaluationCallback.on_interval

    def interrupted(self):
        evaluated.append(self.num_timesteps)
        check, steps = self.on_env_step, []

        def signal_at_the_second_step():
            steps.append(None)
            if len(steps) == 2 and len(evaluated) == number:
                os.kill(os.getpid(), signal.SIGINT)
            check()

        self.on_env_step = signal_at_the_second_step
        try:
            return evaluate(self)
        finally:
            self.on_env_step = check
            assert len(steps) == 2 or len(evaluated) < number

    with monkeypatch.context() as patch:
        patch.setattr(EvaluationCallback, "on_interval", interrupted)
        with pytest.raises(SystemExit) as left:
            main(["train", "gtrxl", *TINY, "--checkpoint-seconds", "1000", "--run", "cut"])
    assert left.value.code == 75
    assert "stopped by SIGINT; resume with: rlxf resume cut" in capsys.readouterr().err
    newest = RunFolder.reopen("cut").resume_checkpoints.newest()
    before = GTrXLPPO.load(newest, device="cpu").num_timesteps
    assert evaluated[-1] - ROLLOUT <= before < evaluated[-1]
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


@pytest.mark.thorough
def test_a_run_interrupted_in_its_first_rollout_begins_again(monkeypatch):
    def stop(self):
        os.kill(os.getpid(), signal.SIGINT)
        self.on_env_step()

    every = ["--evaluate-every", "10"]
    main(["train", "gtrxl", *TINY, *every, "--run", "whole"])
    with monkeypatch.context() as patch:
        patch.setattr(EvaluationCallback, "on_interval", stop)
        with pytest.raises(SystemExit) as left:
            main(["train", "gtrxl", *TINY, *every, "--checkpoint-seconds", "1000", "--run", "cut"])
    assert left.value.code == 75
    assert not Path("cut/checkpoint.zip").exists()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(Path("whole"), Path("cut"))


@pytest.mark.thorough
def test_a_signal_during_the_last_update_stops_the_run(whole, at_update, capsys):
    at_update(ROLLOUTS, [lambda: os.kill(os.getpid(), signal.SIGTERM)])
    with pytest.raises(SystemExit) as left:
        main(["train", "gtrxl", *TINY, "--run", "cut"])
    assert left.value.code == 75
    assert "stopped by SIGTERM" in capsys.readouterr().err
    assert GTrXLPPO.load("cut/checkpoint.zip", device="cpu").num_timesteps == ROLLOUTS * ROLLOUT
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


@pytest.mark.thorough
def test_a_run_killed_after_its_last_update_is_completed(whole):
    with death_expected(die):
        main(["train", "gtrxl", *TINY, "--run", "cut"])
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


@pytest.mark.thorough
def test_missing_final_stages_are_done_once(whole):
    for names in (["completed.json"], ["normalizer.zip"], ["checkpoint.zip", "normalizer.zip"]):
        shutil.copytree("whole", "cut")
        for name in names:
            Path("cut", name).unlink()
        main(["resume", "cut", "--no-progress-bar"])
        assert_same_runs(whole.path, Path("cut"))
        shutil.rmtree("cut")


@pytest.mark.thorough
def test_resume_repeats_a_failed_evaluation(whole, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError("no display")

    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.reports.evaluate", fail)
        assert "resume with: rlxf resume cut" in refused(capsys, "train", "gtrxl", *TINY, "--run", "cut")
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_complete_run_is_not_changed(whole, capsys):
    before = whole.final_checkpoint.read_bytes(), rows(whole.path)
    main(["resume", "whole"])
    message = f"whole is complete: {ROLLOUT * ROLLOUTS} steps; evaluate it with: rlxf evaluate"
    assert message in capsys.readouterr().out
    assert (whole.final_checkpoint.read_bytes(), rows(whole.path)) == before


def test_runs_of_older_versions_are_rejected(tmp_path, capsys):
    RunFolder.create(tmp_path / "old", {"agent": "gtrxl"})
    assert "is missing in its config.json" in refused(capsys, "resume", str(tmp_path / "old"))


def test_options_are_read_from_the_run(whole):
    original = parse(["train", "gtrxl", *TINY, "--run", "whole"])
    options = TrainGTrXL.of_run(whole, original.progress_bar)
    assert options.policy == "MlpGTrXLPolicy"
    parts = ("task", "processes", "learner", "tensorboard", "core")
    for name in (*parts, "total_timesteps", "seed", "checkpoint_seconds"):
        assert getattr(options, name) == getattr(original, name)
