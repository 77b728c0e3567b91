"""Tables that compare reports."""

import numpy as np

from rlxf.data import ReferenceScores
from rlxf.evaluation import Report, compare
from tests.evaluation.test_report import _text as text

SCALE = ReferenceScores(0.0, 10.0, "metadata of test/some-v0")


def lines(table) -> list[str]:
    return [line for line in text(table).splitlines() if "│" in line]


def test_default_title_and_headings():
    report = Report(np.array([1.0, 2.0]), np.array([3, 3]))
    table = compare({"one": report, "other": report})
    assert table.title == "Comparison of agents"
    assert [column.header for column in table.columns] == [
        "agent",
        "episodes",
        "mean return",
        "95% interval",
        "IQM",
    ]


def test_each_report_has_a_row():
    last, best = np.array([1.0, 3.0]), np.array([6.0, 8.0])
    reports = {"last": Report(last, last, references=SCALE), "best": Report(best, best, references=SCALE)}
    table = compare(reports, "Two checkpoints", "checkpoint")
    rows = lines(table)
    assert [row.split("│")[1].strip() for row in rows] == ["last", "best"]
    for row, mean, score in zip(rows, (2, 7), (20, 70), strict=True):
        cells = [cell.strip() for cell in row.split("│")]
        assert str(mean) in cells
        assert f"{score}.0" in cells
    assert "metadata of test/some-v0" in text(table)


def test_unavailable_values_have_no_column():
    values = np.ones(2)
    plain = text(compare({"a": Report(values, values)}, "", ""))
    assert "success" not in plain
    assert "score" not in plain
    assert "50.0%" in text(compare({"a": Report(values, values, np.array([True, False]))}, "", ""))
