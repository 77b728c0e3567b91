"""Tests of the storage of sweeps: studies of other sweeps, hostile files, and unreadable storages."""

import sqlite3
from contextlib import suppress
from types import SimpleNamespace

import optuna
import pytest

from rlxf.experiments import study as module
from rlxf.experiments.study import (
    OtherStudyError,
    StorageError,
    check_database,
    open_study,
    storage_errors,
)
from rlxf.experiments.sweep_file import read_sweep_plan
from tests.experiments.sweeps import FILE, make_sweep

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("train gtrxl", "train bc", "has command = train gtrxl in place of train bc"),
        ("[1, 2, 3]", "[1, 2]", "has search.core.layers.choices = [1, 2, 3] in place of [1, 2]"),
        ("high = 1.0", "high = 0.5", "has search.gamma.high = 1.0 in place of 0.5"),
        ("CartPole-v1", "Acrobot-v1", "has settings.env = CartPole-v1 in place of Acrobot-v1"),
        ("[search]", "[search]\ngae_lambda = [1]", "has search.gae_lambda = nothing in place of"),
        ("trials", "seeds = 2\ntrials", "has seeds = [0] in place of [0, 1]"),
        ("trials", "metric = 'x'\ntrials", "has metric = eval/mean_reward in place of x"),
        ("trials", "direction = 'minimize'\ntrials", "has direction = maximize in place of minimize"),
    ],
)
def test_the_study_of_another_sweep_is_refused(tmp_path, old, new, message):
    make_sweep(tmp_path)
    changed = FILE.replace(old, new).replace('env = "CartPole-v1"', 'env = "CartPole-v1"\ndataset = "x"')
    if "bc" not in new:
        changed = FILE.replace(old, new)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make_sweep(tmp_path, changed)
    assert isinstance(error.value, OtherStudyError), error.value
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change", ["trials = 30", "pruning = false\ntrials = 8", "sampler_seed = 2\ntrials = 8"]
)
def test_trials_and_pruning_can_change(tmp_path, change):
    make_sweep(tmp_path)
    make_sweep(tmp_path, FILE.replace("trials = 8", change))


def test_a_folder_belongs_to_one_sweep_whatever_the_name_of_its_file(tmp_path):
    _, study, _ = make_sweep(tmp_path)
    path = tmp_path / "renamed.toml"
    path.write_text(FILE)
    assert open_study(read_sweep_plan(path), tmp_path).name == study.name
    path.write_text(FILE.replace("high = 1.0", "high = 0.5"))
    with pytest.raises(OtherStudyError, match=r"has search\.gamma\.high = 1\.0 in place of 0\.5"):
        open_study(read_sweep_plan(path), tmp_path)
    assert len(study.storage.get_all_studies()) == 1


@pytest.mark.parametrize("name", ["50%41", "per%cent", "a b+c#d", "äöü"])
def test_the_study_is_in_the_folder_of_the_sweep_whatever_its_name(tmp_path, name):
    make_sweep(tmp_path / name)
    assert (tmp_path / name / "study.db").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_no_file_outside_of_a_folder_with_a_question_mark_is_written(tmp_path):
    with suppress(ValueError):  # URLs of SQLAlchemy 2.0 cannot name such files
        make_sweep(tmp_path / "why?")
    assert [path.name for path in tmp_path.iterdir()] == ["why?"]


def test_a_folder_that_no_url_can_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sqlalchemy.make_url", lambda url: SimpleNamespace(database="other.db"))
    with pytest.raises(ValueError, match="choose another folder with --output"):
        make_sweep(tmp_path)


def test_a_study_of_another_program_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    other = optuna.create_study(storage=url, study_name="sweep")
    other.set_user_attr("owner", "somebody")
    with pytest.raises(OtherStudyError, match="was not made by rlxf sweep"):
        make_sweep(tmp_path)


@pytest.mark.parametrize(
    ("name", "distribution", "value"),
    [
        ("env", optuna.distributions.CategoricalDistribution(["evil:Task-v0"]), "evil:Task-v0"),
        ("gamma", optuna.distributions.FloatDistribution(0, 7), 5.0),
        ("core.layers", optuna.distributions.CategoricalDistribution([9]), 9),
        ("core.layers", optuna.distributions.CategoricalDistribution([True]), True),
    ],
)
def test_options_outside_of_the_search_space_are_refused(tmp_path, name, distribution, value):
    _, study, _ = make_sweep(tmp_path)
    trial = optuna.trial.create_trial(params={name: value}, distributions={name: distribution}, value=1.0)
    study.study.add_trial(trial)
    with pytest.raises(OtherStudyError, match=rf"has a trial 0 with {name} = .*not in the search space"):
        make_sweep(tmp_path)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW v AS SELECT 1",
        "CREATE TRIGGER t AFTER INSERT ON trials BEGIN SELECT 1; END",
        "CREATE TABLE c (a INTEGER, b BLOB AS (zeroblob(1000000000)))",
        "CREATE TABLE c (a INTEGER, b BLOB GENERATED ALWAYS AS(zeroblob(1000000000)) VIRTUAL)",
        "CREATE TABLE c (a INTEGER, b TEXT AS/**/(hex(zeroblob(450000000))))",
        "CREATE TABLE c (a INTEGER, b TEXT DEFAULT (hex(zeroblob(100000000))))",
        "CREATE TABLE c (version_info_id, CHECK (version_info_id=1), CHECK (zeroblob(version_info_id)))",
        "CREATE INDEX i ON trials (abs(number))",
        "CREATE INDEX i ON trials (number) WHERE length(zeroblob(number)) > 0",
    ],
)
def test_files_that_compute_are_refused(tmp_path, statement):
    make_sweep(tmp_path)
    with sqlite3.connect(tmp_path / "study.db") as base:
        base.execute(statement)
    with pytest.raises(ValueError, match="has views, triggers or computed values"):
        make_sweep(tmp_path)


def test_values_of_a_study_are_bounded(tmp_path):
    _, study, _ = make_sweep(tmp_path)
    with study.storage.engine.connect() as connection, pytest.raises(Exception, match="too big"):
        connection.exec_driver_sql(f"SELECT hex(zeroblob({module.MAX_VALUE // 2 + 1}))")


@pytest.mark.parametrize("content", [b"no database", b"\0" * 5000, b"SQLite format 3\0" + b"\xff" * 4080])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "study.db").write_bytes(content)
    with pytest.raises((ValueError, StorageError)) as error:
        make_sweep(tmp_path)
    assert "study.db" in str(error.value)
    assert "\n" not in str(error.value)
    assert (tmp_path / "study.db").read_bytes() == content


def test_large_files_and_links_are_refused(tmp_path, monkeypatch):
    make_sweep(tmp_path)
    (tmp_path / "link.db").symlink_to(tmp_path / "study.db")
    (tmp_path / "folder.db").mkdir()  # like a named pipe, which would block the program
    with pytest.raises(ValueError, match="not a regular file"):
        check_database(tmp_path / "folder.db")
    with pytest.raises(ValueError, match="symbolic link"):
        check_database(tmp_path / "link.db")
    monkeypatch.setattr(module, "MAX_DATABASE", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        make_sweep(tmp_path)


def test_broken_rows_are_refused(tmp_path):
    _, study, _ = make_sweep(tmp_path)
    study.study.set_user_attr("x", 1)
    with sqlite3.connect(tmp_path / "study.db") as base:
        base.execute("UPDATE study_user_attributes SET value_json = '{'")
    with pytest.raises(StorageError, match="cannot use the storage"):
        make_sweep(tmp_path)


def test_errors_of_other_files_do_not_name_the_storage():
    with pytest.raises(PermissionError), storage_errors("sqlite:///study.db"):
        raise PermissionError(13, "Permission denied", "runs/sweep/trial-0003")
    own = pytest.raises(StorageError, match=r"cannot use the storage study\.log: PermissionError")
    with own, storage_errors("study.log"):
        raise PermissionError(13, "Permission denied", "study.log.lock")
    with pytest.raises(StorageError), storage_errors("sqlite:///runs/s/study.db"):
        raise PermissionError(13, "Permission denied", "runs/s/study.db")
    with pytest.raises(StorageError, match="No space left"), storage_errors("runs/s/study.log"):
        raise OSError(28, "No space left on device")


def test_errors_of_a_storage_name_their_cause():
    """Optuna's own error for a full disk speaks of invalid data."""
    own = optuna.exceptions.StorageInternalError("This is often caused by invalid data")
    own.__cause__ = sqlite3.OperationalError("database or disk is full")
    with pytest.raises(StorageError) as error, storage_errors("sqlite:///study.db"):
        raise own
    assert str(error.value) == (
        "cannot use the storage sqlite:///study.db: OperationalError: database or disk is full"
    )


@pytest.mark.parametrize(
    "storage",
    [
        "nonsense://x",
        "redis://localhost",
        "sqlite:////nowhere/study.db",
        "nowhere/study.log",
        "oracle://u:secret@x/y",
        "oracle://u:my@secret@x/y",
    ],
)
def test_storages_that_cannot_be_used_are_named(tmp_path, storage):
    with pytest.raises(StorageError, match="cannot use the storage") as error:
        make_sweep(tmp_path, storage=storage)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_a_journal_with_other_lines_is_refused(tmp_path):
    (tmp_path / "shared.log").write_text("not JSON\n" * 3)
    with pytest.raises(StorageError, match="cannot use the storage"):
        make_sweep(tmp_path, storage=str(tmp_path / "shared.log"))
