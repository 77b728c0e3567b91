"""Tests of the text and HTML representations of tables."""

import numpy as np
import pytest
from rich.console import Console

from rlxf.agents.common.calibration import Calibration
from rlxf.data import ReferenceScores
from rlxf.evaluation import Report, TargetSweep, compare
from rlxf.utils.tables import Table

REPORT = Report(
    np.array([1.0, 2.0, 4.0, 9.0]),
    np.array([10, 20, 30, 40]),
    np.array([True, True, True, False]),
    ReferenceScores(2.0, 12.0, "somewhere"),
)
SWEEP = TargetSweep({2.0: REPORT, 1.5: REPORT})
CALIBRATION = Calibration(
    (1.0, 0.5, 0.0), np.array([0.0, 0.25, 0.5]), np.array([4.0, 3.0, 1.0]), np.array([True, True, False])
)
TABLES = {
    "report": REPORT.table(),
    "sweep": SWEEP.table(),
    "calibration": CALIBRATION.table(),
    "comparison": compare({"a": REPORT, "b": REPORT}, "Two reports", "name"),
}


def rich_output(content: object) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(content)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_names_with_brackets_and_colons_are_shown_as_they_are():
    table = Table("PPO [small]", ":key:")
    table.add_row("a[/b]", "x [bold]y[/bold]")
    for text in (str(table), table._repr_html_()):
        assert all(each in text for each in ("PPO [small]", ":key:", "a[/b]", "x [bold]y[/bold]"))


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_print_equals_rich_print(table, capsys):
    print(table)
    assert capsys.readouterr().out.splitlines() == rich_output(table)
    assert "│" in str(table)


@pytest.mark.parametrize("terminal", ["dumb", "xterm"])
def test_print_does_not_wrap_cells(terminal, monkeypatch):
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")
    wide = "x" * 400
    table = Table("name")
    table.add_row(wide)
    assert wide in str(table)


def test_html_cells_are_escaped():
    table = Table("name")
    table.add_row("1 < 2")
    assert "1 &lt; 2" in table._repr_html_()


@pytest.mark.parametrize("content", [REPORT, SWEEP, CALIBRATION], ids=["report", "sweep", "calibration"])
def test_rich_and_html_output_of_results(content):
    assert rich_output(content) == rich_output(content.table())
    assert content._repr_html_() == content.table()._repr_html_()


def test_text_of_a_report():
    line = (
        "mean return 4 over 4 episodes, 95% interval 1.5 to 7.25, success rate 75.0%, normalized score 20.0"
    )
    assert str(REPORT) == line
    assert repr(REPORT) == f"<Report: {line}>"


def test_text_of_a_report_without_success_rate():
    assert str(Report(np.ones(1), np.ones(1))) == "mean return 1 over 1 episode, 95% interval 1 to 1"


def test_text_of_a_sweep():
    assert str(SWEEP) == str(SWEEP.table())
    assert repr(SWEEP) == "<TargetSweep: mean return of each target {2: 4, 1.5: 4}>"


def test_a_calibration_prints_the_chosen_threshold():
    line = "threshold 0.5: 25.0% other actions, 3.00 passes; 2 of 3 thresholds satisfy the risk bound"
    assert str(CALIBRATION) == line
    assert repr(CALIBRATION) == f"<Calibration: {line}>"


def test_text_of_a_calibration_without_valid_threshold():
    none = Calibration((1.0,), np.array([0.5]), np.array([4.0]), np.array([False]))
    assert str(none) == "0 of 1 thresholds satisfy the risk bound: no early exit"


def test_column_of_a_single_report_is_shown():
    plain = Report(np.ones(2), np.ones(2))
    table = str(compare({"plain": plain, "full": REPORT}, "Both", "name"))
    assert "75.0%" in table
    assert "(somewhere)" in table
