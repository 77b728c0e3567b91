"""``rlxf resume`` of a pre-training: what was cut off ends as if it had not been."""

import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from rlxf.agents.pretraining import MaskedPretraining
from rlxf.cli import main
from rlxf.cli.pretrain import Pretrain
from rlxf.cli.program import parse
from rlxf.training import RunFolder
from rlxf.training.checkpoints import InBackground
from tests.cli.running import refused
from tests.cli.test_resume import rows, scalars
from tests.datasets import ID, record_cartpole
from tests.ranks import on_ranks

UPDATES = 5
TINY = shlex.split(
    f"pretrain --dataset {ID} --updates {UPDATES} --log-interval 2 --context-length 4 --batch-size 4"
    " --checkpoint-seconds 0 --chosen 0.4 --no-progress-bar --core.width 8 --core.layers 1"
    " --core.dropout 0.2 --learning-rate linear:0.01:0.001"
)


@pytest.fixture
def whole(minari_root):
    """The folder of a run that was not cut off."""
    record_cartpole()
    main([*TINY, "--run", "whole"])
    return Path("whole")


@pytest.fixture
def before_update(monkeypatch):
    """Arranges that something happens before an update."""
    train = MaskedPretraining.train
    monkeypatch.setattr(InBackground, "start", lambda self, work: work())  # who dies leaves nothing behind

    def arrange(number, what):
        def watched(self, windows, learning_rate):
            if self._n_updates == number:
                what()
            train(self, windows, learning_rate)

        monkeypatch.setattr(MaskedPretraining, "train", watched)

    return arrange


def assert_same_runs(one, other):
    assert (one / "checkpoint.zip").read_bytes() == (other / "checkpoint.zip").read_bytes()
    assert scalars(one) == scalars(other)
    assert rows(one) == rows(other)


def die():
    raise SystemError("gone")


@pytest.mark.faults
def test_a_run_that_was_stopped_and_then_died_ends_as_if_it_had_not(
    whole, before_update, monkeypatch, capsys
):
    before_update(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        main([*TINY, "--run", "cut"])
    assert left.value.code == 75
    assert "stopped by SIGTERM; go on with: rlxf resume cut" in capsys.readouterr().err
    before_update(3, die)
    with monkeypatch.context() as patch:
        patch.setattr("rlxf.cli.resumable.keep", lambda *_: None)  # who dies keeps nothing
        with pytest.raises(SystemError):
            main(["resume", "cut", "--no-progress-bar"])
    before_update(-1, die)
    main(["resume", "cut", "--no-progress-bar"])
    assert_same_runs(whole, Path("cut"))


def test_what_is_done_says_so_and_what_only_lacks_its_file_gets_it(whole, capsys):
    wanted = (whole / "checkpoint.zip").read_bytes(), rows(whole)
    main(["resume", "whole"])
    assert "whole has all of its 5 updates" in capsys.readouterr().out
    assert ((whole / "checkpoint.zip").read_bytes(), rows(whole)) == wanted
    (whole / "checkpoint.zip").unlink()
    main(["resume", "whole", "--no-progress-bar"])
    assert ((whole / "checkpoint.zip").read_bytes(), rows(whole)) == wanted


def test_a_run_says_with_which_options_it_was_started(whole):
    given = parse([*TINY, "--run", "whole"])
    again = Pretrain.of_run(RunFolder.open("whole"), given.progress_bar)
    found = MaskedPretraining.load("whole/checkpoint.zip", device="cpu")
    read_off = {"return_scale": found.return_scale, "episode_length": found.episode_length}
    learner = replace(given.learner, **read_off)
    assert again == replace(given, learner=learner, core=found.core)


def test_several_processes_are_refused_in_one_line(minari_root, capfd):
    record_cartpole()
    assert on_ranks(2, lambda: main([*TINY, "--run", "two"])) == ["SystemExit: 2"] * 2
    assert "MaskedPretraining supports a single process, got 2" in capfd.readouterr().err
    assert not Path("two").exists()


def test_what_an_older_version_left_is_told(tmp_path, capsys):
    RunFolder.create(tmp_path / "old", {"agent": "pretraining", "dataset": [ID]})
    assert "its config.json lacks" in refused(capsys, "resume", str(tmp_path / "old"))
