"""Tests of experiment trackers: what is sent, and that no failure of a tracker reaches the training."""

import json
import re
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Drawing
from stable_baselines3.common.logger import Figure, HParam, Logger, Video

from rlxf.training import tracker_backends, trackers
from rlxf.training.run_folder import RunFolder
from rlxf.training.tracker_backends import BACKENDS, TrackerBackend
from rlxf.training.trackers import TrackerOutput, attach_tracker, check_tracker, read_run_id
from tests.wandb_files import history, run_ids

CONFIG = {"agent": "test", "core": {"width": 8}, "rate": 0.1, "run": None}
HIDDEN = ("stdout", "log", "json", "csv", "tensorboard")


class Recorder(TrackerBackend):
    """Tracker that keeps what it gets, and fails in the methods with the names in `broken`."""

    package = "recorder"
    broken: tuple[str, ...] = ()
    error: BaseException = RuntimeError("no space left")

    def __init__(self, folder, config):
        super().__init__(folder, config)
        self.calls, self.release = [], threading.Event()

    def _call(self, name, *values):
        self.calls.append((name, *values))
        if name in self.broken:
            raise self.error
        if f"hang {name}" in self.broken:
            self.release.wait(60)

    def start(self, run_id):
        self._call("start", run_id)
        return run_id or "new-id"

    def log(self, scalars, media, step):
        self._call("log", scalars, media, step)

    def table(self, name, columns, rows, step):
        self._call("table", name, columns, rows, step)

    def finish(self):
        self._call("finish")


PROGRAM = """
import atexit, sys, time
from pathlib import Path
from rlxf.training.tracker_backends import TrackerBackend
from rlxf.training.trackers import TrackerOutput

class Slow(TrackerBackend):
    package = "slow"
    def start(self, run_id):
        time.sleep(1)
        atexit.register(self.write, "end of the package")
        return "id"
    def log(self, scalars, media, step): self.write("log")
    def table(self, name, columns, rows, step): pass
    def finish(self): self.write("finish")
    def write(self, text):
        with open(self.folder / "calls", "a") as file: file.write(text + " ")

output = TrackerOutput(Slow(Path(sys.argv[1]), {}))
output.write({"a": 1.0}, {"a": ()}, 1)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("seconds", ["0", "2"])
def test_a_logger_that_is_not_closed_sends_all_at_the_end_of_the_program(tmp_path, seconds):
    """If the tracker has started, it finishes before the package that it has imported ends."""
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), seconds], check=True)
    calls = (tmp_path / "calls").read_text()
    assert calls.startswith("log finish ")
    assert seconds == "0" or calls == "log finish end of the package "


@pytest.fixture
def recorder(tmp_path):
    return Recorder(tmp_path, CONFIG)


def logged(output: TrackerOutput, steps=(10, 20)) -> None:
    """Log a value at some steps, and close the output."""
    logger = Logger(None, [output])
    for step in steps:
        logger.record("a/b", step / 2)
        logger.dump(step)
    logger.close()


def film() -> Video:
    return Video(torch.arange(2 * 3 * 4 * 4, dtype=torch.uint8).reshape(1, 2, 3, 4, 4), fps=5)


def test_scalars_figures_and_videos_are_sent_and_other_values_are_not(recorder):
    output = TrackerOutput(recorder, "known")
    logger = Logger(None, [output])
    logger.record("hidden", np.float32(0.5), exclude=HIDDEN)
    logger.record("count", 3)
    logger.record("figure", Figure(Drawing(), close=True), exclude=HIDDEN)
    logger.record("film", film(), exclude=HIDDEN)
    for tag, other in (("text", "a"), ("bool", True), ("array", np.ones(3)), ("h", HParam({}, {"a": 0.0}))):
        logger.record(tag, other)
    logger.dump(7)
    output.close()
    output.close()
    start, (_, scalars, media, step), finish = recorder.calls
    assert (start, finish) == (("start", "known"), ("finish",))
    assert (scalars, step) == ({"hidden": 0.5, "count": 3.0}, 7)
    assert media["figure"].data.startswith(b"\x89PNG")
    assert media["film"].data.startswith(b"GIF89a")
    assert media.keys() == {"figure", "film"}


@pytest.mark.parametrize("broken", ["start", "log", "table", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("no space\nleft"), SystemExit(1), KeyboardInterrupt()])
def test_a_failure_is_one_warning(recorder, broken, error):
    recorder.broken, recorder.error = (broken,), error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = TrackerOutput(recorder)
        output.table("evaluation", ["a"], [[1]], 5)
        logged(output)
    assert re.search(rf"recorder: \w+ failed with {type(error).__name__}", str(caught[0].message))
    assert len(caught) == 1
    assert len([call for call in recorder.calls if call[0] == "log"]) == (0 if broken == "start" else 2)


def test_a_note_of_a_tracker_is_one_warning(recorder):
    recorder.note = "it is offline"
    with pytest.warns(UserWarning, match="it is offline") as caught:
        logged(TrackerOutput(recorder))
    assert len(caught) == 1


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_tracker_that_hangs_does_not_stop_the_training(recorder, monkeypatch, call):
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    monkeypatch.setattr(trackers, "MAX_WAITING", 5)
    recorder.broken = (f"hang {call}",)
    with pytest.warns(UserWarning, match=r"did not answer within 0.2 s|slower than the training") as caught:
        logged(TrackerOutput(recorder), range(20))
    assert len(caught) == 1
    recorder.release.set()


def test_a_missing_package_is_an_error_with_the_install_command(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    check_tracker(None)
    with pytest.raises(ImportError, match=r"--track wandb requires the package wandb: run pip .*\[track\]"):
        check_tracker("wandb")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"tracker": "recorder", "id": 3}',
        b'{"tracker": "recorder", "id": ["a"]}',
        b'{"tracker": "recorder", "id": ""}',
        b'{"tracker": "recorder", "id": "../../other"}',
        b'{"tracker": "recorder", "id": "a\\nb"}',
        b'{"tracker": "recorder", "id": "' + b"a" * 100 + b'"}',
        b'{"tracker": "recorder", "id": "a", "id": "b"}',
        b"[" * 10**5,
    ],
)
def test_an_invalid_file_starts_a_new_run_with_a_warning(tmp_path, content):
    (tmp_path / "tracker.json").write_bytes(content)
    with pytest.warns(UserWarning, match="tracker.json is invalid"):
        assert read_run_id(tmp_path, "recorder") is None


def test_the_file_of_another_tracker_starts_a_new_run(tmp_path):
    (tmp_path / "tracker.json").write_text('{"tracker": "other", "id": "a"}')
    assert read_run_id(tmp_path, "recorder") is None
    assert read_run_id(tmp_path / "missing", "recorder") is None


def test_the_id_is_kept_in_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "recorder", Recorder)
    for before in (None, "new-id"):
        logger = attach_tracker(Logger(None, []), "recorder", tmp_path, CONFIG)
        (output,) = logger.output_formats
        logger.close()
        assert output.backend.calls[0] == ("start", before)
        assert json.loads((tmp_path / "tracker.json").read_text()) == {"tracker": "recorder", "id": "new-id"}


def track_twice(name, folder):
    """Track a run, then resume it from step 10, and return its ids."""
    run, ids = RunFolder.create(folder, CONFIG), []
    for steps in ((10, 20), (20, 30)):
        logger = attach_tracker(Logger(None, []), name, run.path, run.config)
        (output,) = trackers.tracker_outputs(logger)
        logger.record("picture", Figure(Drawing(), close=True))
        logger.record("film", film())
        logger.record("nothing", float("nan"))
        logger.dump(steps[0])
        output.table("evaluation", ["checkpoint", "mean"], [["last", 1.5]], 30)
        logged(output, steps)
        ids.append(json.loads((run.path / "tracker.json").read_text())["id"])
        RunFolder.reopen(run.path)  # without symbolic links
        time.sleep(1)  # W&B names the folder of an offline run by the second
    return ids


@pytest.fixture
def no_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    assert [str(each.message) for each in caught if "not tracked" in str(each.message)] == []


@pytest.mark.slow
def test_mlflow_gets_values_at_their_steps(tmp_path, monkeypatch, no_warning):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    first, second = track_twice("mlflow", tmp_path / "pole-0")
    assert first == second
    client = mlflow.MlflowClient()
    run = client.get_run(first)
    assert client.get_experiment(run.info.experiment_id).name == "mine"
    assert (run.info.run_name, run.info.status) == ("pole-0", "FINISHED")
    assert run.data.params["rate"] == "0.1"
    values = [(each.step, each.value) for each in client.get_metric_history(first, "a/b")]
    assert values == [(10, 5), (20, 10), (20, 10), (30, 15)]
    assert {each.path for each in client.list_artifacts(first)} == {"config.json", "evaluation.json", "media"}
    films = {each.path for each in client.list_artifacts(first, "media/film")}
    assert films == {"media/film/10.gif", "media/film/20.gif"}


def test_wandb_gets_values_at_their_steps(tmp_path, monkeypatch, no_warning):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    first, second = track_twice("wandb", tmp_path / "pole-0")
    assert run_ids(tmp_path / "pole-0") == [first, second] == [first] * 2
    rows = history(tmp_path / "pole-0")
    values = [(row["time/total_timesteps"], row["a/b"]) for row in rows if "a/b" in row]
    assert values == [(10, 5), (20, 10), (20, 10), (30, 15)]
    films = list((tmp_path / "pole-0").glob("wandb/*/files/media/videos/*.gif"))
    assert len(films) == len([row for row in rows if row.get("film/_type") == "video-file"]) == 2
    assert len([row for row in rows if "evaluation/nrows" in row or "evaluation/_type" in row]) == 2


def warnings_of_a_run(name, folder):
    """Track a run of two steps, and return the warnings."""
    run = RunFolder.create(folder, CONFIG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger = attach_tracker(Logger(None, []), name, run.path, run.config)
        (output,) = trackers.tracker_outputs(logger)
        logged(output)
    return [str(each.message) for each in caught if "not tracked" in str(each.message)]


NOWHERE = "http://127.0.0.1:9"
"""Address at which nothing listens."""


@pytest.mark.parametrize(
    ("login", "reason"),
    [
        ({}, "W&B has no login"),
        ({"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": NOWHERE}, "W&B is not available"),
    ],
    ids=["no login", "no connection"],
)
def test_wandb_records_offline_without_a_login_or_a_connection(tmp_path, monkeypatch, login, reason):
    wandb = pytest.importorskip("wandb")
    for variable in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))  # file of logins
    monkeypatch.setattr(tracker_backends, "TIMEOUT", 6)
    for variable, value in login.items():
        monkeypatch.setenv(variable, value)
    wandb.teardown()  # reads the environment again
    (warning,) = warnings_of_a_run("wandb", tmp_path / "pole-0")
    assert reason in warning
    assert "upload it with: wandb sync" in warning
    assert [row["a/b"] for row in history(tmp_path / "pole-0") if "a/b" in row] == [5, 10]


def test_mlflow_without_a_connection_is_one_warning(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", NOWHERE)
    (warning,) = warnings_of_a_run("mlflow", tmp_path / "pole-0")
    assert "mlflow" in warning


def test_trackio_gets_values_at_their_steps(tmp_path, monkeypatch, no_warning):
    pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "store")
    monkeypatch.setenv("TRACKIO_PROJECT", "mine")
    first, second = track_twice("trackio", tmp_path / "pole-0")
    assert first == second
    rows = sqlite_storage.SQLiteStorage.get_logs("mine", "pole-0")
    values = [(row["step"], row["a/b"]) for row in rows if "a/b" in row]
    assert sorted(values) == [(10, 5), (20, 10), (20, 10), (30, 15)]
    assert len([row for row in rows if "film" in row]) == 2
    assert sqlite_storage.SQLiteStorage.get_run_config("mine", "pole-0")["rate"] == 0.1
