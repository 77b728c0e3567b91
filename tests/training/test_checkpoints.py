"""Tests of periodic checkpoints during training."""

import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch
from stable_baselines3.common.callbacks import CallbackList

from rlxf.agents.common.checkpoint import newest_checkpoint_file
from rlxf.evaluation import EvaluationCallback
from rlxf.training import Archive, CheckpointFolder, CheckpointWriter, read_archive
from rlxf.training.checkpoints import BackgroundWriter, stateful_callbacks
from rlxf.utils.signals import StopRequest


class Learner:
    """Agent with a single weight vector that equals its number of steps."""

    def __init__(self):
        self.num_timesteps, self._n_updates, self.resumable = 0, 0, True
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
    has_resumable_training = True


def write_checkpoint(folder, step):
    folder.write(step, Archive({"agent": {"step": step}}, {"policy": {"w": torch.full((100,), float(step))}}))


def test_checkpoint_contains_the_state_at_its_step(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=9)
    Learner().learn(4, CheckpointWriter(folder, every_seconds=0))
    for file in folder.files():
        archive = read_archive(file)
        step = archive.documents["agent"]["step"]
        assert file == folder.file(step)
        assert archive.tensors["policy"]["w"].tolist() == [step] * 3
    assert folder.newest() == folder.file(4)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    folder = CheckpointFolder(str(tmp_path), keep=2)
    for step in (5, 20, 100, 1000):
        write_checkpoint(folder, step)
    assert folder.files() == [folder.file(100), folder.file(1000)]


def test_other_files_in_the_folder_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    (tmp_path / "best.zip").write_text("mine")
    for step in (1, 2):
        write_checkpoint(folder, step)
    assert {file.name for file in tmp_path.iterdir()} == {"best.zip", folder.file(2).name}


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_the_folder_of_the_checkpoints(tmp_path, kind):
    Learner().learn(9, CheckpointWriter(kind(tmp_path / "checkpoints"), every_seconds=1000))
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.files() == [folder.file(9)]


def test_a_folder_of_checkpoints_is_a_path_to_resume_from(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for step in (5, 20):
        write_checkpoint(folder, step)
    assert newest_checkpoint_file(folder) == folder.file(20)


def test_no_checkpoint_before_the_period_has_passed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    Learner().learn(4, CheckpointWriter(folder, every_seconds=1000))
    assert folder.files() == [folder.file(4)]  # only the checkpoint at the end


def test_no_checkpoint_while_training_cannot_be_resumed(tmp_path):
    learner = Learner()
    learner.resumable = False
    Learner.learn(learner, 4, CheckpointWriter(CheckpointFolder(tmp_path), every_seconds=0))
    assert not list(tmp_path.iterdir())


def test_training_that_can_never_be_resumed_warns_and_stops_without_a_checkpoint(tmp_path):
    learner, stop = Learner(), StopRequest()
    learner.resumable = learner.has_resumable_training = False
    stop.signal = signal.SIGTERM
    checkpoints = CheckpointWriter(CheckpointFolder(tmp_path), every_seconds=0, stop=stop)
    with pytest.warns(UserWarning, match="cannot be resumed, so no checkpoint is written"):
        learner.learn(4, checkpoints)
    assert (learner.num_timesteps, checkpoints.stopped) == (1, True)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_an_earlier_training_warns(tmp_path):
    folder = CheckpointFolder(tmp_path)
    Learner().learn(9, CheckpointWriter(folder, every_seconds=1000))
    with pytest.warns(UserWarning, match="an earlier training with more steps, up to step-000000000009.zip"):
        Learner().learn(4, CheckpointWriter(folder, every_seconds=1000))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damaged_checkpoint_is_reported_and_the_previous_one_used(tmp_path, damage):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        write_checkpoint(folder, step)
    data = bytearray(folder.file(2).read_bytes())
    data[len(data) // 2] ^= 1
    folder.file(2).write_bytes({"cut": data[:-10], "flipped": data, "empty": b""}[damage])
    with pytest.warns(UserWarning, match=f"{folder.file(2).name}.*the previous checkpoint is used"):
        assert folder.newest() == folder.file(1)


def test_missing_valid_checkpoint_is_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no valid checkpoint in {tmp_path}"):
        CheckpointFolder(tmp_path).newest()
    with pytest.raises(FileNotFoundError, match="no valid checkpoint"):
        CheckpointFolder(tmp_path / "missing").newest()


def test_full_disk_is_reported_and_other_checkpoints_are_kept(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    write_checkpoint(folder, 1)

    def full(path, documents, tensors):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("rlxf.training.checkpoints.write_archive", full)
    with pytest.raises(OSError, match="No space left"):
        Learner().learn(4, CheckpointWriter(folder, every_seconds=0))
    assert folder.files() == [folder.file(1)]


def test_stop_request_saves_a_checkpoint_first(tmp_path):
    class StopAtStepThree(CheckpointWriter):
        def _on_step(self):
            if self.num_timesteps == 3:
                self.stop.signal = signal.SIGTERM
            return super()._on_step()

    learner, folder, stop = Learner(), CheckpointFolder(tmp_path), StopRequest()
    checkpoints = StopAtStepThree(folder, every_seconds=1000, stop=stop)
    learner.learn(9, checkpoints)
    assert checkpoints.stopped
    assert learner.num_timesteps == 3
    assert folder.files() == [folder.file(3)]


def test_stop_request_during_a_rollout_saves_after_the_rollout(tmp_path):
    learner, folder, stop = Learner(), CheckpointFolder(tmp_path), StopRequest()
    checkpoints = CheckpointWriter(folder, every_seconds=1000, stop=stop)
    checkpoints.init_callback(learner)
    checkpoints.on_training_start({}, {})
    learner.resumable, learner.num_timesteps = False, 5
    stop.signal = signal.SIGUSR1
    assert checkpoints.on_step()  # during a rollout, training continues
    learner.resumable, learner.num_timesteps = True, 6
    checkpoints.on_rollout_start()
    learner.resumable, learner.num_timesteps = False, 7
    assert not checkpoints.on_step()
    checkpoints.on_training_end()
    assert folder.files() == [folder.file(6)]


@pytest.mark.parametrize("updates", [0, 2])
def test_updates_that_no_checkpoint_has_are_reported(tmp_path, updates):
    """A callback may stop a rollout in the middle; without updates, the last checkpoint has its weights."""
    learner, saving = Learner(), CheckpointWriter(CheckpointFolder(tmp_path), every_seconds=1000)
    saving.init_callback(learner)
    saving.on_training_start({}, {})
    learner.resumable, learner.num_timesteps, learner._n_updates = False, 5, updates
    with warnings.catch_warnings(record=True) as caught:
        saving.on_training_end()
    assert [str(each.message).partition("lack ")[2] for each in caught] == [
        "the updates since step 0: save the trained weights with agent.save(path)"
    ] * bool(updates)


def test_training_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    may_write = threading.Event()
    monkeypatch.setattr(CheckpointFolder, "write", lambda *_: may_write.wait())

    class CheckedAtEnd(CheckpointWriter):
        def _on_training_end(self):
            assert self._writer.busy  # all steps are done before the first checkpoint is written
            may_write.set()
            super()._on_training_end()

    Learner().learn(50, CheckedAtEnd(CheckpointFolder(tmp_path), every_seconds=0))


class Steps:
    """Object whose state is a list that later steps change."""

    def __init__(self):
        self.seen = []

    def state(self):
        return self.seen


def test_states_are_those_at_the_step_of_the_checkpoint(tmp_path, monkeypatch):
    may_write, write = threading.Event(), CheckpointFolder.write

    def write_later(folder, step, archive):
        may_write.wait()
        write(folder, step, archive)

    monkeypatch.setattr(CheckpointFolder, "write", write_later)
    steps = Steps()
    writer = CheckpointWriter(tmp_path, stateful={"steps": steps})
    writer.init_callback(Learner())
    writer.on_training_start({}, {})
    steps.seen.append(1)
    writer.save()
    steps.seen.append(2)
    may_write.set()
    writer.close()
    assert read_archive(writer.folder.newest()).documents["stateful"] == {"steps": [1]}


def test_background_error_is_raised_once():
    background = BackgroundWriter()
    background.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        background.wait()
    background.wait()
    assert not background.busy


def test_invalid_arguments_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        CheckpointFolder(tmp_path, keep=0)
    with pytest.raises(ValueError, match="keep must be a whole number"):
        CheckpointFolder(tmp_path, keep=1.5)
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="every_seconds must be at least 0"):
            CheckpointWriter(CheckpointFolder(tmp_path), every_seconds=seconds)


@pytest.mark.parametrize("keep", range(1, 7))
def test_a_new_checkpoint_is_kept_next_to_those_of_more_steps(tmp_path, keep):
    """The folder may hold an earlier training, or damaged files after the checkpoint to resume from."""
    folder, steps = CheckpointFolder(tmp_path, keep=keep), (200, 300, 10, 20, 30, 40, 50, 60, 70)
    for number, step in enumerate(steps, start=1):
        write_checkpoint(folder, step)
        kept = sorted(steps[:number][-keep:])
        assert folder.files() == [folder.file(each) for each in kept]


def test_each_of_several_callbacks_of_a_class_has_a_state():
    first, second = (EvaluationCallback("CartPole-v1", episodes=n) for n in (1, 2))
    found = stateful_callbacks(CallbackList([first, CallbackList([second])]))
    assert list(found.values()) == [first, second]
