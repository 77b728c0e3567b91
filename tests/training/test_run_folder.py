"""Tests of run folders: creation, opening, loggers, and errors about missing parts."""

import csv
import errno
import json
import os

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf.training import Archive, CheckpointFolder, RunFolder, run_folder
from rlxf.training.resumed_logger import LogPosition, read_rows
from tests.training.samples import files_in

CONFIG = {"agent": "gtrxl", "env": "rlxf/TMaze-v0", "seed": 3}


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs" / "first", CONFIG)


def test_new_folder_contains_the_config(run):
    assert files_in(run.path) == {"config.json"}
    assert json.loads((run.path / "config.json").read_text()) == run.config == CONFIG


def test_run_with_a_checkpoint_can_be_opened(run):
    run.final_checkpoint.touch()
    assert RunFolder.open(run.path) == run


def test_discard_removes_only_the_run(run):
    run.make_logger().close()
    other = RunFolder.create(run.path.with_name("second"), CONFIG)
    run.discard()
    assert files_in(run.path.parent) == {"second"}
    assert files_in(other.path) == {"config.json"}


def test_existing_folder_is_rejected_and_unchanged(run):
    run.final_checkpoint.write_text("mine")
    with pytest.raises(FileExistsError, match=r"first exists; choose another"):
        RunFolder.create(run.path, {})
    assert run.final_checkpoint.read_text() == "mine"
    assert RunFolder.open(run.path).config == CONFIG


def test_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file/run cannot be created \(.+\); choose another folder"):
        RunFolder.create(tmp_path / "file" / "run", CONFIG)


@pytest.mark.faults
def test_full_disk_leaves_no_folder(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(run_folder, "write_file", full)
    with pytest.raises(OSError, match="full"):
        RunFolder.create(tmp_path / "run", CONFIG)
    assert files_in(tmp_path) == set()


@pytest.mark.faults
def test_error_while_filling_leaves_no_folder(tmp_path):
    """The folder appears only after it is filled, so a killed process leaves no incomplete run."""
    observed = []

    def fill(folder):
        observed.append((files_in(folder), (tmp_path / "run").exists()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunFolder.create(tmp_path / "run", CONFIG, fill)
    assert observed == [({"config.json"}, False)]
    assert files_in(tmp_path) == set()


@pytest.mark.faults
def test_old_temporary_folder_is_removed(tmp_path):
    left, new = (tmp_path / f".rlxf-{digit * 32}.tmp" for digit in "ab")
    for each in (left, new):
        each.mkdir()
        (each / "config.json").touch()
    for path in (left / "config.json", left):
        os.utime(path, (0, 0))
    RunFolder.create(tmp_path / "run", CONFIG)
    assert not left.exists()
    assert new.exists()


def test_completion_requires_marker_and_results(run):
    assert run.completion is None
    run.final_checkpoint.write_bytes(b"weights")
    run.complete(96)
    assert run.completion.steps == 96
    assert run.completion.changed(run.path) == []
    run.final_checkpoint.write_bytes(b"others")
    assert run.completion.changed(run.path) == ["checkpoint.zip"]
    run.final_checkpoint.unlink()
    assert run.completion is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"steps": "x", "sha256": {}}', '{"steps": 1, "sha256": 3}']
)
def test_invalid_marker_is_ignored(run, text):
    (run.path / "completed.json").write_text(text)
    assert run.completion is None


def test_config_that_is_not_json_leaves_no_folder(tmp_path):
    with pytest.raises(TypeError):
        RunFolder.create(tmp_path / "run", {"env": object()})
    assert files_in(tmp_path) == set()


def test_missing_folder_file_and_other_folder_are_reported(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run folder .*none"):
        RunFolder.open(tmp_path / "none")
    (tmp_path / "gtrxl-0").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no run folder .*gtrx-0; did you mean .*/gtrxl-0\?"):
        RunFolder.open(tmp_path / "gtrx-0")
    (tmp_path / "gtrxl-0").rmdir()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        RunFolder.open(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        RunFolder.open(tmp_path)


def test_run_without_checkpoint_is_reported(run):
    with pytest.raises(FileNotFoundError, match=r"first has no checkpoint\.zip, .*; train it again"):
        RunFolder.open(run.path)


def test_run_that_was_killed_is_to_be_resumed(run):
    run.resume_checkpoints.path.mkdir()
    run.resume_checkpoints.file(4).touch()
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint\.zip, .*: continue it with rlxf resume .*first"
    ):
        RunFolder.open(run.path)


@pytest.mark.parametrize(
    "name",
    ["checkpoint.zip", "progress.csv", "checkpoints", "evaluation", "checkpoints/step-000000000002.zip"],
)
def test_run_with_symbolic_link_is_rejected(run, tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run.final_checkpoint.touch()
    link = run.path / name
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim)
    for opening in (RunFolder.open, RunFolder.reopen):
        with pytest.raises(ValueError, match=rf"{name} is a symbolic link to .*victim"):
            opening(run.path)
    assert victim.read_text() == "mine"


def test_link_to_a_run_folder_is_followed(run):
    run.final_checkpoint.touch()
    link = run.path.with_name("latest")
    link.symlink_to(run.path)
    assert RunFolder.open(link).config == CONFIG


def test_run_is_not_writable_by_others_for_any_umask(tmp_path):
    before = os.umask(0)
    try:
        run = RunFolder.create(tmp_path / "runs/first", CONFIG)
        run.make_logger().close()
        CheckpointFolder(run.path / "checkpoints").write(3, Archive({"agent": {}}, {}))
        run.continue_logger(LogPosition.from_json(run.log_files.state()), 3).close()
    finally:
        os.umask(before)
    made = [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]
    assert len(made) == 8
    assert not [path for path in made if path.stat().st_mode & 0o022]


@pytest.mark.parametrize("text", ["", "{", '{"a": NaN}', "[" * 5000, "[1]", "3"])
def test_invalid_config_is_reported(run, text):
    run.final_checkpoint.touch()
    (run.path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        RunFolder.open(run.path)


def test_logger_writes_tensorboard_and_csv(run):
    logger = run.make_logger()
    for step in (1, 2):
        logger.record("rollout/ep_rew_mean", step / 2)
        logger.dump(step)
    logger.close()
    events = EventAccumulator(str(run.path)).Reload().Scalars("rollout/ep_rew_mean")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 1.0)]
    with open(run.path / "progress.csv", newline="") as file:
        assert [row["rollout/ep_rew_mean"] for row in csv.DictReader(file)] == ["0.5", "1.0"]


def test_logger_prints_nothing(run, capsys):
    logger = run.make_logger()
    logger.record("time/fps", 123)
    logger.dump()
    logger.close()
    assert capsys.readouterr().out == ""


def test_second_logger_does_not_overwrite_the_log(run):
    run.make_logger().close()
    (run.path / "progress.csv").write_text("time/fps\n1\n")
    with pytest.raises(FileExistsError, match=r"progress\.csv exists and would be overwritten"):
        run.make_logger()
    assert (run.path / "progress.csv").read_text() == "time/fps\n1\n"


def test_named_pipes_are_refused(tmp_path):
    """A program that reads a pipe waits until another program writes to it."""
    run = RunFolder.create(tmp_path / "run", {})
    os.mkfifo(run.path / "progress.csv")
    with pytest.raises(ValueError, match=r"progress\.csv is neither a file nor a folder"):
        RunFolder.reopen(run.path)


def test_a_log_of_many_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "progress.csv"
    with open(path, "wb") as file:
        file.truncate(8 * 2**30)  # takes no space on the disk
    with pytest.raises(ValueError, match="a line of over 1,048,576 characters"):
        next(read_rows(path))
