"""Tests of the comparison of groups, and of its files."""

import csv
import json

import numpy as np
import pytest

from rlxf.evaluation import intervals
from rlxf.evaluation.aggregates import mean_score, probability_of_improvement
from rlxf.experiments.comparison import by_task, compare_groups, comparison_table, write_comparison
from rlxf.experiments.curves import Curve
from rlxf.experiments.groups import Group

METRIC = "eval/mean_reward"


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 499)


def group(label, finals, task="T-v0", steps=(0, 10, 20), **options):
    """Return a group whose curves are 0 before their last value."""
    return Group(label, task, [Curve.of_points(steps, [0, 0, final]) for final in finals], **options)


def test_scores_are_last_values():
    first, second = compare_groups([group("a", [1, 2, 3]), group("b", [0, 2])], METRIC)
    assert first.scores == (1, 2, 3)
    assert (first.mean, second.mean) == (mean_score([[1, 2, 3]]), mean_score([[0, 2]]))
    assert (first.median.value, first.iqm.value, first.steps) == (2, 2, (20, 20))
    assert first.improvement is None
    assert second.improvement == probability_of_improvement([[1, 2, 3]], [[0, 2]])
    assert second.improvement.value == pytest.approx((1 + 0 + 1 + 0.5 + 1 + 1) / 6)
    assert first.area == pytest.approx(np.mean([0.25, 0.5, 0.75]))


def test_several_last_values_are_averaged():
    (found,) = compare_groups([group("a", [2, 4])], METRIC, last=2)
    assert found.scores == (1, 2)


def test_areas_cover_the_steps_of_all_trainings():
    short = group("b", [0], steps=(0, 5, 10))
    found = compare_groups([group("a", [8]), short], METRIC)
    assert [each.area for each in found] == [0, 0]  # the first curve is 0 up to step 10
    apart = group("b", [0], steps=(30, 40, 50))
    assert [each.area for each in compare_groups([group("a", [8]), apart], METRIC)] == [None, None]


def test_a_run_with_one_value_does_not_remove_the_areas_of_others():
    """A random agent has a single value, at step 0."""
    random = Group("random", "T-v0", [Curve.of_points([0], [1])])
    found = compare_groups([group("a", [8]), random], METRIC)
    assert [each.area for each in found] == [2, None]
    cut = Group("b", "T-v0", [Curve.of_points([0, 10], [10, 10]), Curve.of_points([0], [0])])
    (found,) = compare_groups([cut], METRIC)
    assert found.area is None, "an area of one seed is not that of the group"


def test_a_training_that_ended_early_does_not_shorten_the_areas_of_others():
    """An early training keeps its return up to the last step of the task, as in a plot."""
    fast = Group("a", "T-v0", [Curve.of_points([0, 10], [10, 10])], ended_early=[True])
    slow = Group("b", "T-v0", [Curve.of_points([0, 10, 30], [0, 0, 20])])
    assert [each.area for each in compare_groups([fast, slow], METRIC)] == pytest.approx([10, 20 / 3])
    assert [each.area for each in compare_groups([fast, slow], "train/loss")] == [10, 0]


def test_nothing_is_averaged_over_tasks():
    groups = [group("a", [1]), group("a", [2], task="S-v0"), group("b", [3])]
    with pytest.raises(ValueError, match="must have the same task, got T-v0, S-v0"):
        compare_groups(groups, METRIC)
    with pytest.raises(ValueError, match="no group"):
        compare_groups([], METRIC)
    assert {task: len(members) for task, members in by_task(groups).items()} == {"T-v0": 2, "S-v0": 1}


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1)])
def test_a_comparison_with_one_seed_has_no_interval(sizes):
    first, second = (group(name, range(size)) for name, size in zip("ab", sizes, strict=True))
    record = compare_groups([first, second], METRIC)[1].record()
    assert record["probability_of_improvement"] is not None
    assert record["probability_of_improvement_low"] is None
    table = comparison_table(compare_groups([first, second], METRIC), METRIC)
    assert " to " not in table.markdown().split("|")[-3]


def test_one_seed_has_no_interval():
    (found,) = compare_groups([group("a", [3])], METRIC)
    assert found.record() | {"mean": 3, "mean_low": None, "mean_high": None} == found.record()
    text = str(comparison_table([found], "x"))
    assert " to " not in text
    assert "Groups with one seed have no intervals" in text


def test_the_table_names_task_metric_seeds_and_the_first_group():
    rows = compare_groups([group("a", [1, 2, 4], unfinished=1), group("b", [0, 1])], METRIC)
    text = str(comparison_table(rows, "eval/mean_reward"))
    for part in ("T-v0: last eval/mean_reward", "3, 1 unfinished", "P(a > this)", "│ 2.333 (", " 20 "):
        assert part in text, part
    assert "mean of the last 3 values of x" in str(comparison_table(rows, "x", 3))
    assert "this" not in str(comparison_table(rows[:1], "x"))


def tasks():
    groups = [group("a|b", [1, 2]), group("c", [0.5]), group("a|b", [5], task="S-v0")]
    return [compare_groups(members, METRIC) for members in by_task(groups).values()]


def test_csv_has_a_line_for_each_group_of_each_task(tmp_path):
    path = tmp_path / "t.csv"
    write_comparison(path, tasks(), "m")
    rows = list(csv.DictReader(path.open()))
    assert [(row["task"], row["group"], row["seeds"]) for row in rows] == [
        ("T-v0", "a|b", "2"),
        ("T-v0", "c", "1"),
        ("S-v0", "a|b", "1"),
    ]
    assert (rows[0]["metric"], rows[0]["mean"], rows[0]["mean_low"]) == ("m", "1.5", "1.0")
    assert (rows[1]["mean_low"], rows[1]["probability_of_improvement"]) == ("", "1.0")


def test_json_has_the_scores_of_all_seeds(tmp_path):
    path = tmp_path / "t.json"
    write_comparison(path, tasks(), "m")
    found = json.loads(path.read_text())
    assert [each["scores"] for each in found] == [[1, 2], [0.5], [5]]
    assert found[0]["probability_of_improvement"] is None


def test_markdown_has_a_table_for_each_task(tmp_path):
    path = tmp_path / "t.MD"
    path.write_text("old")
    write_comparison(path, tasks(), "m")
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.endswith("last m")] == ["T-v0: last m", "S-v0: last m"]
    assert len([line for line in lines if line.startswith("| a\\|b |")]) == 2
    bars = [line.replace("\\|", "").count("|") for line in lines if line.startswith("|")]
    assert bars == [9, 9, 9, 9, 8, 8, 8]


def test_files_are_written_as_a_whole_or_not_at_all(tmp_path):
    with pytest.raises(OSError, match="cannot write"):
        write_comparison(tmp_path / "missing" / "t.csv", tasks(), "m")
    assert not list(tmp_path.iterdir())
