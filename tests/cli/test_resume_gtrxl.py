"""``rlxf resume`` of an online run: what was cut off ends as if it had not been."""

import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf import GTrXLPPO
from rlxf.cli import main
from rlxf.cli.program import parse
from rlxf.cli.train_gtrxl import TrainGTrXL
from rlxf.training import RunFolder
from rlxf.training.checkpoints import InBackground
from tests.cli.running import refused
from tests.cli.test_resume import die, rows, scalars

ROLLOUT, ROLLOUTS = 2 * 16, 6
TINY = shlex.split(
    f"--env CartPole-v1 --total-timesteps {ROLLOUT * ROLLOUTS} --episodes 3 --evaluate-every 50"
    " --n-envs 2 --n-steps 16 --segment-length 8 --batch-size 16 --checkpoint-seconds 0 --no-progress-bar"
    " --normalize-observations --normalize-rewards --evaluation-episodes 2 --memory-every 2"
    " --attention-maps-every 4 --histograms-every 1 --no-videos"
    " --core.width 8 --core.layers 1 --core.memory.length 8"
)
OF_THE_CLOCK = ("time/fps", "time/time_elapsed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that was not cut off."""
    folder = tmp_path_factory.mktemp("trained") / "whole"
    main(["train", "gtrxl", *TINY, "--run", str(folder)])
    return folder


@pytest.fixture
def whole(trained):
    """A copy of it."""
    shutil.copytree(trained, "whole")
    return RunFolder.open("whole")


@pytest.fixture(autouse=True)
def in_foreground(monkeypatch):
    """A checkpoint is on the disk before the next step: nobody waits for a thread of a run that died."""
    monkeypatch.setattr(InBackground, "start", lambda self, work: work())


@pytest.fixture
def at_update(monkeypatch):
    """Arranges that something happens before the update behind a rollout, once."""
    train = GTrXLPPO.train

    def arrange(number, what):
        def watched(self):
            if self.iterations == number and what:
                what.pop()()
            train(self)

        monkeypatch.setattr(GTrXLPPO, "train", watched)

    return arrange


def lines(run):
    return [{key: value for key, value in row.items() if key not in OF_THE_CLOCK} for row in rows(run)]


def histograms(run):
    """Steps, smallest, largest and sum of those of weights, gradients and what was played."""
    events = EventAccumulator(str(run), {"histograms": 0}).Reload()
    found = {}
    for tag in events.Tags()["histograms"]:
        values = [(each.step, each.histogram_value) for each in events.Histograms(tag)]
        found[tag] = [(step, value.min, value.max, value.sum) for step, value in values]
    return found


def header(run):
    return (run / "progress.csv").read_text().splitlines()[0]


def assert_same_runs(one, other):
    for name in ("checkpoint.zip", "normalizer.zip", "best.zip", "best-normalizer.zip"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert header(one) == header(other)
    assert scalars(one) == scalars(other)
    assert histograms(one) == histograms(other)
    assert lines(one) == lines(other)


@pytest.mark.parametrize("number", [2, 5])
def test_a_run_that_died_ends_as_if_it_had_not(whole, at_update, monkeypatch, number):
    at_update(number, [die])
    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.resumable.keep", lambda *_: None)  # who dies keeps nothing
        with pytest.raises(SystemError):
            main(["train", "gtrxl", *TINY, "--run", "cut"])
    assert not Path("cut/checkpoint.zip").exists()
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_stops_it_behind_the_update_at_hand(whole, at_update, capsys, name):
    at_update(3, [lambda: os.kill(os.getpid(), getattr(signal, name))])
    with pytest.raises(SystemExit) as left:
        main(["train", "gtrxl", *TINY, "--run", "cut"])
    assert left.value.code == 75
    assert f"stopped by {name}; go on with: rlxf resume cut" in capsys.readouterr().err
    newest = RunFolder.reopen("cut").checkpoints.newest()
    assert GTrXLPPO.load(newest, device="cpu").num_timesteps == 3 * ROLLOUT
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_signal_amid_the_last_update_is_heeded(whole, at_update, capsys):
    at_update(ROLLOUTS, [lambda: os.kill(os.getpid(), signal.SIGTERM)])
    with pytest.raises(SystemExit) as left:
        main(["train", "gtrxl", *TINY, "--run", "cut"])
    assert left.value.code == 75
    assert "stopped by SIGTERM" in capsys.readouterr().err
    assert GTrXLPPO.load("cut/checkpoint.zip", device="cpu").num_timesteps == ROLLOUTS * ROLLOUT
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_what_dies_behind_its_last_update_is_finished(whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.resumable.keep", lambda *_: die())
        with pytest.raises(SystemError):
            main(["train", "gtrxl", *TINY, "--run", "cut"])
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_what_was_not_done_after_the_last_update_is_done_and_nothing_twice(whole):
    for names in (["completed.json"], ["normalizer.zip"], ["checkpoint.zip", "normalizer.zip"]):
        shutil.copytree("whole", "cut")
        for name in names:
            Path("cut", name).unlink()
        main(["resume", "cut", "--no-progress-bar"])
        assert_same_runs(whole.path, Path("cut"))
        shutil.rmtree("cut")


def test_an_evaluation_that_failed_is_made_by_resume(whole, monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError("no display")

    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.train_gtrxl.evaluate", fail)
        assert "go on with: rlxf resume cut" in refused(capsys, "train", "gtrxl", *TINY, "--run", "cut")
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole.path, Path("cut"))


def test_a_run_that_is_done_says_so_and_stays(whole, capsys):
    before = whole.checkpoint.read_bytes(), rows(whole.path)
    main(["resume", "whole"])
    assert f"whole has all of its {ROLLOUT * ROLLOUTS} steps; see: rlxf evaluate" in capsys.readouterr().out
    assert (whole.checkpoint.read_bytes(), rows(whole.path)) == before


def test_a_run_of_an_older_version_is_told(tmp_path, capsys):
    RunFolder.create(tmp_path / "old", {"agent": "gtrxl"})
    assert "its config.json lacks" in refused(capsys, "resume", str(tmp_path / "old"))


def test_a_run_says_with_which_options_it_was_started(whole):
    given = parse(["train", "gtrxl", *TINY, "--run", "whole"])
    again = TrainGTrXL.of_run(whole, given.progress_bar)
    assert again.policy == "MlpGTrXLPolicy"
    parts = ("task", "processes", "learner", "looks", "core")
    for name in (*parts, "total_timesteps", "seed", "checkpoint_seconds"):
        assert getattr(again, name) == getattr(given, name)
