"""Reports of evaluations, their output formats, and comparisons of reports."""

import json

import numpy as np
import pytest
from rich.console import Console
from stable_baselines3.common.logger import configure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from rlxf.data import ReferenceScores
from rlxf.evaluation import Report, compare

RETURNS = np.array([1.0, 2.0, 4.0, 9.0])
LENGTHS = np.array([10, 20, 30, 40])
SUCCESSES = np.array([True, True, True, False])
SCALE = ReferenceScores(0.0, 10.0, "metadata of test/some-v0")


@pytest.fixture
def report():
    return Report(RETURNS, LENGTHS, SUCCESSES)


def test_numbers(report):
    assert report.episodes == 4
    assert report.mean == 4.0
    assert report.std == pytest.approx(np.sqrt((9 + 4 + 0 + 25) / 4))
    assert report.iqm == 3.0
    assert report.mean_length == 25.0
    assert report.success_rate == 0.75
    assert report.ci[0] < report.mean < report.ci[1]


def test_equal_returns_have_no_deviation():
    """The mean of 100 numbers -0.22 is rounded, so they would deviate from it by 5.6e-17."""
    report = Report(np.full(100, -0.22), np.full(100, 51))
    assert report.std == 0
    assert "-0.22 ± 0" in [*report.table().columns[1].cells]


def test_json_round_trip(report):
    data = json.loads(report.to_json())
    assert data["returns"] == RETURNS.tolist()
    assert data["lengths"] == LENGTHS.tolist()
    assert data["successes"] == SUCCESSES.tolist()
    assert data["mean"] == report.mean
    assert tuple(data["ci"]) == report.ci
    assert data["success_rate"] == 0.75


def test_report_without_success():
    report = Report(RETURNS, LENGTHS)
    assert report.success_rate is None
    assert "eval/success_rate" not in report.scalars()
    assert json.loads(report.to_json())["successes"] is None
    assert "success" not in rendered(report.table())


def test_report_with_reference_scores():
    report = Report(RETURNS, LENGTHS, references=ReferenceScores(2.0, 12.0, "somewhere"))
    assert report.normalized_score == report.scalars()["eval/normalized_score"] == 20.0
    data = json.loads(report.to_json())
    assert data["normalized_score"] == 20.0
    assert data["references"] == {"minimum": 2.0, "maximum": 12.0, "source": "somewhere"}
    table = " ".join(rendered(report.table()).split())
    assert "20.0" in table
    assert "0 is a return of 2, 100 one of 12 (somewhere)" in table


def test_report_without_reference_scores(report):
    assert report.normalized_score is None
    assert "eval/normalized_score" not in report.scalars()
    assert "score" not in rendered(report.table())


def test_table_shows_the_numbers(report):
    text = rendered(report.table())
    for part in ("4 episodes", "mean return ± std", "4 ± 3.1", "3", "25", "75.0%"):
        assert part in text


@pytest.mark.parametrize(
    ("returns", "shown"),
    [([0, 9], "4.5 ± 4.5"), ([300, 508], "404 ± 100"), ([0, 2870], "1435 ± 1400"), ([7, 7], "7 ± 0")],
)
def test_standard_deviation_has_two_digits_without_an_exponent(returns, shown):
    report = Report(np.array(returns, dtype=np.float64), np.array([1, 1]), None)
    assert f"{shown} " in rendered(report.table())


def test_sb3_logger_and_tensorboard_writer_get_the_same_tags(report, tmp_path):
    logger = configure(str(tmp_path / "logger"), ["tensorboard"])
    report.log(logger, 640)
    logger.close()
    with SummaryWriter(str(tmp_path / "writer")) as writer:
        report.log(writer, 640)
    expected = {tag: (640, pytest.approx(value)) for tag, value in report.scalars().items()}
    assert _events(tmp_path / "logger") == _events(tmp_path / "writer") == expected
    assert set(expected) == {
        "eval/mean_reward",
        "eval/mean_ep_length",
        "eval/success_rate",
        "eval/iqm",
        "eval/ci_low",
        "eval/ci_high",
    }


@pytest.mark.parametrize(
    ("returns", "lengths", "message"),
    [
        (np.array([]), np.array([]), r"\(0,\)"),
        (np.array([1.0]), np.array([1, 2]), r"\(1,\), \(2,\)"),
        (np.ones((2, 2)), np.ones((2, 2)), r"\(2, 2\)"),
        (np.array([1.0, np.nan]), np.array([1, 2]), "nan"),
    ],
)
def test_invalid_arrays_raise(returns, lengths, message):
    with pytest.raises(ValueError, match=message):
        Report(returns, lengths)


def rendered(table) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _events(folder) -> dict[str, tuple[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    last = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    return {tag: (event.step, event.value) for tag, event in last.items()}


def lines(table) -> list[str]:
    return [line for line in rendered(table).splitlines() if "│" in line]


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
    assert "metadata of test/some-v0" in rendered(table)


def test_unavailable_values_have_no_column():
    values = np.ones(2)
    plain = rendered(compare({"a": Report(values, values)}, "", ""))
    assert "success" not in plain
    assert "score" not in plain
    assert "50.0%" in rendered(compare({"a": Report(values, values, np.array([True, False]))}, "", ""))
