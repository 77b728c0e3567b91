"""Tests of ``rlxf resume`` for pretrainings: an interrupted run ends like an uninterrupted one."""

import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from rlxf.agents.pretraining import MaskedPretraining
from rlxf.cli import main
from rlxf.cli.commands.train_offline import Pretrain
from rlxf.cli.entry_point import parse
from rlxf.training import RunFolder
from rlxf.training.checkpoints import BackgroundWriter
from tests.cli.running import death_expected, die, refused
from tests.cli.test_resume import rows, scalars
from tests.datasets import ID, record_cartpole
from tests.ranks import on_ranks

UPDATES = 5
TINY = shlex.split(
    f"pretrain --dataset {ID} --updates {UPDATES} --log-interval 2 --context-length 4 --batch-size 4"
    " --checkpoint-seconds 0 --mask-probability 0.4 --no-progress-bar --core.width 8 --core.layers 1"
    " --core.dropout 0.2 --learning-rate linear:0.01:0.001"
)


@pytest.fixture
def whole(minari_root):
    """Folder of an uninterrupted run."""
    record_cartpole()
    main([*TINY, "--run", "whole"])
    return Path("whole")


@pytest.fixture
def before_update(monkeypatch):
    """Function that calls an action before an update."""
    train = MaskedPretraining.train
    monkeypatch.setattr(
        BackgroundWriter, "start", lambda self, work: work()
    )  # no thread finishes after a crash

    def arrange(number, action):
        def watched(self, windows, learning_rate):
            if self._n_updates == number:
                action()
            train(self, windows, learning_rate)

        monkeypatch.setattr(MaskedPretraining, "train", watched)

    return arrange


def assert_same_runs(one, other):
    assert (one / "checkpoint.zip").read_bytes() == (other / "checkpoint.zip").read_bytes()
    assert scalars(one) == scalars(other)
    assert rows(one) == rows(other)


@pytest.mark.faults
def test_a_stopped_and_killed_run_ends_like_an_uninterrupted_one(whole, before_update, capsys):
    before_update(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        main([*TINY, "--run", "cut"])
    assert left.value.code == 75
    assert "stopped by SIGTERM; resume with: rlxf resume cut" in capsys.readouterr().err
    before_update(3, die)
    with death_expected():
        main(["resume", "cut", "--no-progress-bar"])
    before_update(-1, die)
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole, Path("cut"))


def test_a_complete_run_is_not_changed_and_a_missing_checkpoint_restored(whole, capsys):
    expected = (whole / "checkpoint.zip").read_bytes(), rows(whole)
    main(["resume", "whole"])
    assert "whole is complete: 5 updates" in capsys.readouterr().out
    assert ((whole / "checkpoint.zip").read_bytes(), rows(whole)) == expected
    (whole / "checkpoint.zip").unlink()
    main(["resume", "whole", "--no-progress-bar"])
    assert ((whole / "checkpoint.zip").read_bytes(), rows(whole)) == expected


def test_options_are_read_from_the_run(whole):
    original = parse([*TINY, "--run", "whole"])
    options = Pretrain.of_run(RunFolder.open("whole"), original.progress_bar)
    pretraining = MaskedPretraining.load("whole/checkpoint.zip", device="cpu")
    from_data = {"return_scale": pretraining.return_scale, "episode_length": pretraining.episode_length}
    learner = replace(original.learner, **from_data)
    assert options == replace(original, learner=learner, core=pretraining.core)


def test_several_processes_are_rejected(minari_root, capfd):
    record_cartpole()
    assert on_ranks(2, lambda: main([*TINY, "--run", "two"])) == ["SystemExit: 2"] * 2
    assert "MaskedPretraining supports a single process, got 2" in capfd.readouterr().err
    assert not Path("two").exists()


def test_runs_of_older_versions_are_rejected(tmp_path, capsys):
    RunFolder.create(tmp_path / "old", {"agent": "pretraining", "dataset": [ID]})
    assert "is missing in its config.json" in refused(capsys, "resume", str(tmp_path / "old"))
