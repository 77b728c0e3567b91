"""A log that goes on has every point once: as if nobody had been cut off."""

import csv

import pytest
from stable_baselines3.common.logger import CSVOutputFormat, TensorBoardOutputFormat
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlxf.training.continued_log import STEP, ContinuedCSV, ContinuedTensorBoard


def write(log, steps, value=1.0, **more):
    for step in steps:
        row = {STEP: step, "loss": step * value, **more}
        log.write(row, dict.fromkeys(row), step)


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_rows_behind_the_point_are_taken_back(tmp_path):
    path = tmp_path / "progress.csv"
    log = CSVOutputFormat(str(path))
    write(log, range(5), value=2)
    log.close()
    log = ContinuedCSV(path, step=2)
    write(log, range(3, 8))
    log.close()
    assert [float(row["loss"]) for row in rows(path)] == [0, 2, 4, 3, 4, 5, 6, 7]


def test_new_columns_may_come(tmp_path):
    path = tmp_path / "progress.csv"
    log = CSVOutputFormat(str(path))
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
