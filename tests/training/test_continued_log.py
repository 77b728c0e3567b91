"""A log that goes on has every point once: as if nobody had been cut off."""

import csv

import pytest
from stable_baselines3.common.logger import TensorBoardOutputFormat
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf.training.continued_log import STEP, ContinuedCSV, ContinuedTensorBoard, ProgressCSV


def write(log, steps, value=1.0, **more):
    for step in steps:
        row = {STEP: step, "loss": step * value, **more}
        log.write(row, dict.fromkeys(row), step)


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_rows_behind_the_point_are_taken_back(tmp_path):
    path = tmp_path / "progress.csv"
    log = ProgressCSV(path)
    write(log, range(5), value=2)
    log.close()
    log = ContinuedCSV(path, step=2)
    write(log, range(3, 8))
    log.close()
    assert [float(row["loss"]) for row in rows(path)] == [0, 2, 4, 3, 4, 5, 6, 7]


def test_new_columns_may_come(tmp_path):
    path = tmp_path / "progress.csv"
    log = ProgressCSV(path)
    write(log, range(2), text='with "quotes", and\na line')
    log.close()
    log = ContinuedCSV(path, step=1)
    write(log, [2], text="plain")
    log.write({STEP: 3, "eval": 0.5}, {STEP: None, "eval": None}, 3)
    log.close()
    found = rows(path)
    assert [row[STEP] for row in found] == ["0", "1", "2", "3"]
    assert [row["eval"] for row in found] == ["", "", "", "0.5"]


def test_a_row_that_was_cut_off_does_not_count(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text(f"{STEP},loss\n0,1\n1,2\n2,")
    ContinuedCSV(path, step=9).close()
    assert path.read_text() == f"{STEP},loss\n0,1\n1,2\n"


KEYS = [f"{group}/{name}" for group in ("train", "eval", "rollout") for name in "pqxyzabc"]


@pytest.mark.parametrize("order", [KEYS, KEYS[::-1]])
def test_columns_are_sorted_from_the_first_row_on(tmp_path, order):
    path = tmp_path / "progress.csv"
    log = ProgressCSV(path)
    for number in range(1, len(order) + 1):
        logged = dict.fromkeys(order[:number], 0.5) | {STEP: number}
        log.write(logged, dict.fromkeys(logged), number)
        header = path.read_text().splitlines()[0].split(",")
        assert header == [STEP, *sorted(order[:number])]
    log.close()
    found = rows(path)
    assert [row[STEP] for row in found] == [str(number) for number in range(1, len(order) + 1)]
    assert [sum(value != "" for value in row.values()) for row in found] == list(range(2, len(order) + 2))


def test_a_resumed_log_is_that_of_a_run_left_alone(tmp_path):
    """Columns that came after the point go with their rows: the file is equal, byte for byte."""
    whole, cut = ProgressCSV(tmp_path / "whole.csv"), ProgressCSV(tmp_path / "cut.csv")
    for log in (whole, cut):
        write(log, range(3))
    write(cut, [3, 4], only_here=1)
    cut.close()
    cut = ContinuedCSV(tmp_path / "cut.csv", step=2)
    for log in (whole, cut):
        write(log, range(3, 6), new=0.5)
        log.close()
    assert (tmp_path / "cut.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.parametrize("made", [True, False])
def test_an_empty_or_missing_file_is_begun(tmp_path, made):
    path = tmp_path / "progress.csv"
    if made:
        path.touch()
    log = ContinuedCSV(path, step=0)
    write(log, [7])
    log.close()
    assert rows(path) == [{STEP: "7", "loss": "7.0"}]


def test_no_point_is_doubled_in_tensorboard(tmp_path):
    log = TensorBoardOutputFormat(str(tmp_path))
    write(log, range(6), value=2)
    log.close()
    log = ContinuedTensorBoard(tmp_path, step=3)
    write(log, range(4, 8))
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [event.step for event in events] == list(range(8))
    assert [event.value for event in events] == [0, 2, 4, 6, 4, 5, 6, 7]
