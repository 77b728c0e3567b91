"""Tests of ``--track``: a tracked run is the same run, and it is continued after an interruption."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from rlxf.cli import main
from rlxf.training import trackers
from rlxf.training.tracker_backends import BACKENDS
from rlxf.training.trackers import check_tracker
from tests.cli.running import refused, train
from tests.training.test_trackers import Recorder
from tests.wandb_files import history, run_ids

OPTIONS = ["--checkpoint-seconds", "0", "--evaluate-every", "32", "--evaluation-episodes", "2"]


@pytest.fixture
def recorders(monkeypatch):
    """Backends that record instead of W&B, in the order of the runs."""
    made = []

    def make(folder, config):
        made.append(Recorder(folder, config))
        return made[-1]

    monkeypatch.setitem(BACKENDS, "wandb", make)
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    return made


def steps(folder) -> list[int]:
    with open(Path(folder, "progress.csv")) as file:
        return [int(row["time/total_timesteps"]) for row in csv.DictReader(file)]


def sent(recorder, name="log") -> list:
    return [call for call in recorder.calls if call[0] == name]


def test_a_tracker_gets_the_log_and_the_final_evaluation(recorders):
    train("--run", "run", *OPTIONS, "--track", "wandb")
    (recorder,) = recorders
    assert [call[-1] for call in sent(recorder)] == steps("run")
    assert all("time/total_timesteps" in call[1] for call in sent(recorder))
    ((_, name, columns, rows, step),) = sent(recorder, "table")
    report = json.loads(Path("run/evaluation.json").read_text())
    assert (name, step, [row[0] for row in rows]) == ("evaluation", 64, list(report))
    assert dict(zip(columns, rows[0], strict=True))["mean return"] == pytest.approx(report["last"]["mean"])
    assert recorder.config["track"] == "wandb"
    assert recorder.calls[-1] == ("finish",)


@pytest.mark.parametrize("broken", ["start", "log", "table", "finish"])
def test_training_finishes_when_a_tracker_fails(recorders, monkeypatch, capsys, broken):
    monkeypatch.setattr(Recorder, "broken", (broken,))
    train("--run", "run", *OPTIONS, "--track", "wandb")
    assert capsys.readouterr().err.count("rlxf: warning: run is not tracked completely by recorder: ") == 1
    assert Path("run/completed.json").is_file()
    assert steps("run")[-1] == 64


def test_a_resumed_run_continues_the_run_of_the_tracker(recorders):
    train("--run", "run", *OPTIONS, "--track", "wandb")
    main(["resume", "run", "--total-timesteps", "96", "--no-progress-bar"])
    first, second = recorders
    assert (first.calls[0], second.calls[0]) == (("start", None), ("start", "new-id"))
    assert {call[-1] for call in sent(second)} == {96}


def test_an_invalid_file_of_the_tracker_does_not_stop_a_resumed_run(recorders, capsys):
    train("--run", "run", *OPTIONS, "--track", "wandb")
    Path("run/tracker.json").write_text('{"tracker": "wandb", "id": "../x"}')
    main(["resume", "run", "--total-timesteps", "96", "--no-progress-bar"])
    assert "rlxf: warning: run/tracker.json is invalid" in capsys.readouterr().err
    assert recorders[1].calls[0] == ("start", None)


def test_a_baseline_is_tracked(recorders):
    task = ["--env", "CartPole-v1", "--total-timesteps", "64", "--episodes", "2", "--evaluate-every", "0"]
    small = ["--arguments", '{"n_steps": 32, "batch_size": 32, "n_epochs": 1}', "--quiet"]
    main(["baseline", "ppo", *task, *small, "--run", "run", "--track", "wandb"])
    (recorder,) = recorders
    assert [call[-1] for call in sent(recorder)] == steps("run")
    assert len(sent(recorder, "table")) == 1


def test_a_distillation_is_tracked_apart_from_its_teacher(recorders):
    train("--run", "teacher", *OPTIONS, "--track", "wandb")
    main(["distill", "teacher", "--run", "one", "--steps", "32", "--no-progress-bar"])
    assert len(recorders) == 1, "the student inherited the tracker of its teacher"
    main(["distill", "teacher", "--run", "two", "--steps", "32", "--no-progress-bar", "--track", "wandb"])
    _, recorder = recorders
    assert [call[-1] for call in sent(recorder)] == steps("two") != []
    assert recorder.config["track"] == "wandb"
    assert json.loads(Path("one/config.json").read_text())["track"] is None


@pytest.mark.parametrize("words", [["train", "gtrxl"], ["baseline", "ppo"]])
def test_a_missing_package_is_an_error_before_the_training(capsys, monkeypatch, words):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    message = refused(capsys, *words, "--env", "CartPole-v1", "--run", "run", "--track", "mlflow")
    assert "--track mlflow requires the package mlflow" in message
    assert "[track]" in message
    assert not Path("run").exists()


@pytest.mark.first_cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("tracker", BACKENDS)
def test_a_tracked_run_has_the_same_weights(tmp_path, monkeypatch, tracker):
    pytest.importorskip(tracker)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    train("--run", "run", *OPTIONS)
    shutil.move("run", "untracked")
    train("--run", "run", *OPTIONS, "--track", tracker)
    assert Path("run/checkpoint.zip").read_bytes() == Path("untracked/checkpoint.zip").read_bytes()
    assert steps("run") == steps("untracked")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_resumed_run_continues_the_run_of_wandb(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train("--run", "run", *OPTIONS, "--track", "wandb")
    main(["resume", "run", "--total-timesteps", "96", "--no-progress-bar"])
    first, second = run_ids(Path("run"))
    assert first == second
    logged = [row["time/total_timesteps"] for row in history(Path("run"))]
    assert sorted(set(logged)) == [32, 64, 96]


def test_no_tracker_needs_no_package():
    check_tracker(None)


@pytest.mark.parametrize("value", ["other", "os", 3, ["wandb"], {"a": 1}])
def test_an_unknown_tracker_in_a_config_is_an_error(recorders, capsys, value):
    train("--run", "run", *OPTIONS)
    config = Path("run/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"track": value}))
    message = refused(capsys, "resume", "run", "--total-timesteps", "96")
    assert "track" in message
    assert recorders == []


def test_settings_of_a_run_do_not_name_its_tracker(recorders):
    train("--run", "run", *OPTIONS, "--track", "wandb")
    main(["train", "gtrxl", "--config", "run", "--run", "copy", "--no-progress-bar"])
    assert json.loads(Path("copy/config.json").read_text())["track"] is None
    assert len(recorders) == 1
