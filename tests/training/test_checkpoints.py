"""Checkpoints are written beside the training, and the newest whole one is found again."""

import signal
import threading

import pytest
import torch

from rlxf.training import Archive, CheckpointFolder, Checkpoints, read_archive
from rlxf.training.checkpoints import InBackground
from rlxf.training.stopping import Stop


class Learner:
    """An agent whose only weight is the number of its steps."""

    def __init__(self):
        self.num_timesteps, self._n_updates, self.at_rest = 0, 0, True
        self.weight = torch.zeros(3)

    def snapshot(self):
        return Archive({"agent": {"step": self.num_timesteps}}, {"policy": {"w": self.weight.clone()}})

    def learn(self, steps, callback):
        callback.init_callback(self)
        callback.on_training_start({}, {})
        for _ in range(steps):
            self.num_timesteps += 1
            self.weight += 1
            if not callback.on_step():
                break
        callback.on_training_end()

    def get_env(self):
        return None

    logger = None


def a_checkpoint(folder, step):
    folder.write(step, Archive({"agent": {"step": step}}, {"policy": {"w": torch.full((100,), float(step))}}))


def test_each_holds_what_was_there_when_it_was_taken(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=9)
    Learner().learn(4, Checkpoints(folder, every_seconds=0))
    for file in folder.files():
        archive = read_archive(file)
        step = archive.documents["agent"]["step"]
        assert file == folder.file(step)
        assert archive.tensors["policy"]["w"].tolist() == [step] * 3
    assert folder.newest() == folder.file(4)


def test_the_last_few_are_kept(tmp_path):
    folder = CheckpointFolder(str(tmp_path), keep=2)
    for step in (5, 20, 100, 1000):
        a_checkpoint(folder, step)
    assert folder.files() == [folder.file(100), folder.file(1000)]


def test_other_files_are_left_alone(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    (tmp_path / "best.zip").write_text("mine")
    for step in (1, 2):
        a_checkpoint(folder, step)
    assert {file.name for file in tmp_path.iterdir()} == {"best.zip", folder.file(2).name}


def test_none_is_taken_before_its_time(tmp_path):
    folder = CheckpointFolder(tmp_path)
    Learner().learn(4, Checkpoints(folder, every_seconds=1000))
    assert folder.files() == [folder.file(4)]  # that at the end alone


def test_none_is_taken_of_an_agent_that_is_not_at_rest(tmp_path):
    learner = Learner()
    learner.at_rest = False
    Learner.learn(learner, 4, Checkpoints(CheckpointFolder(tmp_path), every_seconds=0))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_one_is_named_and_the_one_before_it_is_taken(tmp_path, damage):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        a_checkpoint(folder, step)
    data = bytearray(folder.file(2).read_bytes())
    data[len(data) // 2] ^= 1
    folder.file(2).write_bytes({"cut": data[:-10], "flipped": data, "empty": b""}[damage])
    with pytest.warns(UserWarning, match=f"{folder.file(2).name}.*the one before it is used"):
        assert folder.newest() == folder.file(1)


def test_without_a_whole_one_it_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no whole checkpoint in {tmp_path}"):
        CheckpointFolder(tmp_path).newest()
    with pytest.raises(FileNotFoundError, match="no whole checkpoint"):
        CheckpointFolder(tmp_path / "missing").newest()


def test_a_disk_that_is_full_is_told_and_the_others_stay(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    a_checkpoint(folder, 1)

    def full(path, documents, tensors):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("rlxf.training.checkpoints.write_archive", full)
    with pytest.raises(OSError, match="No space left"):
        Learner().learn(4, Checkpoints(folder, every_seconds=0))
    assert folder.files() == [folder.file(1)]


def test_who_asks_to_stop_gets_a_checkpoint_first(tmp_path):
    class Asked(Checkpoints):
        def _on_step(self):
            if self.num_timesteps == 3:
                self.stop.by = signal.SIGTERM
            return super()._on_step()

    learner, folder, stop = Learner(), CheckpointFolder(tmp_path), Stop()
    checkpoints = Asked(folder, every_seconds=1000, stop=stop)
    learner.learn(9, checkpoints)
    assert checkpoints.stopped
    assert learner.num_timesteps == 3
    assert folder.files() == [folder.file(3)]


def test_who_asks_amid_a_rollout_gets_the_one_before_the_next(tmp_path):
    learner, folder, stop = Learner(), CheckpointFolder(tmp_path), Stop()
    checkpoints = Checkpoints(folder, every_seconds=1000, stop=stop)
    checkpoints.init_callback(learner)
    checkpoints.on_training_start({}, {})
    learner.at_rest, learner.num_timesteps = False, 5
    stop.by = signal.SIGUSR1
    assert checkpoints.on_step()  # amid a rollout: it goes on
    learner.at_rest, learner.num_timesteps = True, 6
    checkpoints.on_rollout_start()
    learner.at_rest, learner.num_timesteps = False, 7
    assert not checkpoints.on_step()
    checkpoints.on_training_end()
    assert folder.files() == [folder.file(6)]


def test_the_training_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    may_write = threading.Event()
    monkeypatch.setattr(CheckpointFolder, "write", lambda *_: may_write.wait())

    class Watched(Checkpoints):
        def _on_training_end(self):
            assert self._writer.busy  # all steps are done, and the first is not yet written
            may_write.set()
            super()._on_training_end()

    Learner().learn(50, Watched(CheckpointFolder(tmp_path), every_seconds=0))


def test_what_went_wrong_is_raised_once():
    background = InBackground()
    background.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        background.wait()
    background.wait()
    assert not background.busy


def test_bad_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        CheckpointFolder(tmp_path, keep=0)
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="every_seconds must be at least 0"):
            Checkpoints(CheckpointFolder(tmp_path), every_seconds=seconds)
