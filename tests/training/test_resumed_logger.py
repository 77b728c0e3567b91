"""Tests of log continuation: a resumed log equals the log of an uninterrupted run."""

import csv
import tracemalloc

import pytest
from stable_baselines3.common.logger import TensorBoardOutputFormat
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf.training import CheckpointError
from rlxf.training.resumed_logger import (
    STEP,
    LogFiles,
    LogPosition,
    ProgressCSV,
    count_rows,
    cut_events,
    read_rows,
)
from rlxf.training.tensorboard import resumed_output


def write(log, steps, value=1.0, **more):
    for step in steps:
        row = {STEP: step, "loss": step * value, **more}
        log.write(row, dict.fromkeys(row), step)


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_rows_after_the_position_are_removed(tmp_path):
    path = tmp_path / "progress.csv"
    log = ProgressCSV(path)
    write(log, range(5), value=2)
    log.close()
    log = ProgressCSV(path, rows=3)
    write(log, range(3, 8))
    log.close()
    assert [float(row["loss"]) for row in rows(path)] == [0, 2, 4, 3, 4, 5, 6, 7]


def test_columns_can_be_added(tmp_path):
    path = tmp_path / "progress.csv"
    log = ProgressCSV(path)
    write(log, range(2), text='with "quotes", and\na line')
    log.close()
    log = ProgressCSV(path, rows=2)
    write(log, [2], text="plain")
    log.write({STEP: 3, "eval": 0.5}, {STEP: None, "eval": None}, 3)
    log.close()
    table = rows(path)
    assert [row[STEP] for row in table] == ["0", "1", "2", "3"]
    assert [row["eval"] for row in table] == ["", "", "", "0.5"]


def test_any_text_is_kept(tmp_path):
    path = tmp_path / "progress.csv"
    log = ProgressCSV(path)
    write(log, range(3), größe="a\r\nb")
    log.close()
    assert rows(path)[2]["größe"] == "a \nb"
    before = path.read_bytes()
    ProgressCSV(path, rows=3).close()
    assert path.read_bytes() == before
    assert count_rows(path) == 3


def test_incomplete_last_row_is_ignored(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text(f"{STEP},loss\n0,1\n1,2\n2,")
    ProgressCSV(path, rows=9).close()
    assert path.read_text() == f"{STEP},loss\n0,1\n1,2\n"


KEYS = [f"{group}/{name}" for group in ("train", "eval", "rollout") for name in "pqxyzabc"]


@pytest.mark.parametrize("order", [KEYS, KEYS[::-1]])
def test_columns_are_sorted_from_the_first_row_on(tmp_path, order):
    path = tmp_path / "progress.csv"
    log = ProgressCSV(path)
    for number in range(1, len(order) + 1):
        values = dict.fromkeys(order[:number], 0.5) | {STEP: number}
        log.write(values, dict.fromkeys(values), number)
        header = path.read_text().splitlines()[0].split(",")
        assert header == [STEP, *sorted(order[:number])]
    log.close()
    table = rows(path)
    assert [row[STEP] for row in table] == [str(number) for number in range(1, len(order) + 1)]
    assert [sum(value != "" for value in row.values()) for row in table] == list(range(2, len(order) + 2))


def test_resumed_log_equals_that_of_an_uninterrupted_run(tmp_path):
    """Columns that appeared after the position are removed with their rows; the files are byte-identical."""
    whole, cut = ProgressCSV(tmp_path / "whole.csv"), ProgressCSV(tmp_path / "cut.csv")
    for log in (whole, cut):
        write(log, range(3))
    write(cut, [3, 4], only_here=1)
    cut.close()
    cut = ProgressCSV(tmp_path / "cut.csv", rows=3)
    for log in (whole, cut):
        write(log, range(3, 6), new=0.5)
        log.close()
    assert (tmp_path / "cut.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.parametrize("made", [True, False])
def test_empty_or_missing_file_is_created(tmp_path, made):
    path = tmp_path / "progress.csv"
    if made:
        path.touch()
    log = ProgressCSV(path)
    write(log, [7])
    log.close()
    assert rows(path) == [{STEP: "7", "loss": "7.0"}]


def test_continuation_from_the_start_removes_everything(tmp_path):
    write(log := ProgressCSV(tmp_path / "progress.csv"), range(3), other=1.0)
    log.close()
    write(log := TensorBoardOutputFormat(str(tmp_path)), range(3))
    log.close()
    ProgressCSV(tmp_path / "progress.csv").close()
    resumed_output(tmp_path, LogPosition(), step=0).close()
    assert (tmp_path / "progress.csv").read_bytes() == b""
    assert not EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]


def points(folder, tag="loss"):
    return [(each.step, each.value) for each in EventAccumulator(str(folder)).Reload().Scalars(tag)]


def test_tensorboard_has_no_duplicate_points(tmp_path):
    """A point of the same step that was logged after the position is removed, too."""
    log = TensorBoardOutputFormat(str(tmp_path))
    write(log, range(4), value=2)
    position = LogPosition.from_json(LogFiles(tmp_path).state())
    write(log, range(3, 6), value=2)
    log.close()
    killed_again = resumed_output(tmp_path, position, step=3)
    write(killed_again, range(3, 5))
    killed_again.close()
    log = resumed_output(tmp_path, position, step=3)
    write(log, range(4, 8))
    log.close()
    assert sorted(points(tmp_path)) == [(step, step * (2 if step < 4 else 1)) for step in range(8)]


def test_symbolic_link_among_events_is_not_followed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_bytes(b"mine")
    link = tmp_path / "run" / "events.out.tfevents.1.host.1.0"
    link.symlink_to(tmp_path / "victim")
    cut_events(tmp_path / "run", {link.name: 1})
    assert (tmp_path / "victim").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "document",
    [None, {}, {"rows": -1, "events": {}}, {"rows": 2**63, "events": {}}, {"rows": 1, "events": {"a": "b"}}],
)
def test_invalid_log_position_is_rejected(document):
    with pytest.raises(CheckpointError):
        LogPosition.from_json(document)


@pytest.mark.parametrize("text", ["", "a,b\n", "a,b\n1,2\n\n3,4\n", "a,b\n1,2\n3,", 'a,b\n"1\n2",3\n4,5\n'])
def test_rows_are_counted_without_reading_them_all(tmp_path, text):
    (tmp_path / "progress.csv").write_text(text)
    assert count_rows(tmp_path / "progress.csv") == len(list(read_rows(tmp_path / "progress.csv")))
    assert count_rows(tmp_path / "missing.csv") == 0


def test_a_large_log_is_continued_in_little_memory(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text(f"{STEP},text\n" + f"1,{'x' * 100_000}\n" * 700)
    assert LogFiles(tmp_path).state()["rows"] == 700
    tracemalloc.start()
    try:
        log = ProgressCSV(path, rows=699)
        write(log, [2], new=0.5)
        log.close()
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()
    assert count_rows(path) == 700


def test_a_line_without_end_is_refused(tmp_path):
    (tmp_path / "progress.csv").write_text("a" * (2**20 + 1))
    with pytest.raises(ValueError, match="a line of over 1,048,576 characters"):
        ProgressCSV(tmp_path / "progress.csv", rows=1)


@pytest.mark.parametrize("line", ['"1,2', "1," + "2" * 200_000, '"1"x,2'], ids=["quote", "field", "text"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "progress.csv"
    path.write_text(f"a,b\n1,2\n{line}\n3,4\n")
    for read in (lambda: list(read_rows(path)), lambda: count_rows(path)):
        with pytest.raises(
            ValueError, match=r"progress\.csv line \d is damaged .*: correct or remove the line"
        ):
            read()
