"""Tests of figures: what is drawn, and files."""

import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from rlxf.evaluation import intervals
from rlxf.evaluation.aggregates import performance_profile
from rlxf.experiments import curves
from rlxf.experiments.curves import Curve
from rlxf.experiments.figures import (
    LINE_STYLES,
    MAX_LINES,
    MAX_PANELS,
    UNTRAINED_STYLES,
    final_score_figure,
    learning_curves,
    line_styles,
    performance_profile_figure,
    plain,
    save_figure,
)
from rlxf.experiments.groups import Group


def test_lines_of_returns_continue_where_trainings_ended_early():
    solved = Curve.of_points([100, 200], [1, 9])
    group = Group("a", "t", [solved, Curve.of_points([100, 200, 300], [1, 2, 3])], ended_early=[True, False])
    for metric, steps, last in (("eval/mean_reward", 300, 6), ("train/loss", 200, 5.5)):
        (line,) = learning_curves([group], metric).axes[0].lines
        assert (line.get_xdata()[-1], line.get_ydata()[-1]) == (steps, last)


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 199)
    monkeypatch.setattr(curves, "RESAMPLES", 199)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def group(label, seeds=3, task="T-v0", steps=(10, 20, 30)):
    rng = np.random.default_rng(0)
    return Group(label, task, [Curve.of_points(steps, rng.normal(size=len(steps))) for _ in range(seeds)])


def legend(figure):
    found = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    return [text.get_text() for each in found for text in each.get_texts()]


def test_each_task_has_a_panel_and_each_group_a_line():
    groups = [group("a"), group("b"), group("a", task="S-v0")]
    figure = learning_curves(groups, "eval/mean_reward")
    assert [axes.get_title() for axes in figure.axes] == ["T-v0", "S-v0"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 1]
    assert figure.axes[0].lines[0].get_color() == figure.axes[1].lines[0].get_color()
    assert figure.axes[0].get_ylabel() == "eval/mean_reward"
    assert figure.axes[0].get_xlabel() == "steps"


def test_lines_are_means_up_to_the_last_step_of_all_seeds():
    short, long = Curve.of_points([10, 20], [0, 2]), Curve.of_points([10, 20, 30], [2, 4, 9])
    (axes,) = learning_curves([Group("a", "T-v0", [short, long])], "x").axes
    assert axes.lines[0].get_xydata().tolist() == [[10, 1], [20, 3]]


def test_a_group_without_common_step_has_no_line():
    apart = [Curve.of_points([10], [0]), Curve.of_points([20], [0])]
    (axes,) = learning_curves([Group("a", "T-v0", apart), group("b")], "x").axes
    assert len(axes.lines) == 1


def test_the_legend_has_the_number_of_seeds_and_says_that_one_has_no_interval():
    groups = [group("a", 3), group("b", 1), group("c", 2), group("c", 5, task="S-v0")]
    figure = learning_curves(groups, "x")
    shown = [text.replace("\N{NO-BREAK SPACE}", " ").replace("\n", " ") for text in legend(figure)]
    assert shown == ["a (3 seeds)", "b (1 seed, no interval)", "c (2 to 5 seeds)"]
    assert [len(axes.collections) for axes in figure.axes] == [2, 1]


def test_the_legend_has_the_number_of_unfinished_trainings():
    groups = [
        replace(group("a", 3), unfinished=2),
        replace(group("b", 1), unfinished=1, finished=[False]),
        replace(group("d", 2), unfinished=2, finished=[True, False]),
        group("c"),
    ]
    shown = [text.replace("\N{NO-BREAK SPACE}", " ") for text in legend(learning_curves(groups, "x"))]
    assert [text.replace("\n", " ") for text in shown] == [
        "a (3 seeds, 2 unfinished runs left out)",
        "b (1 seed, no interval, 1 unfinished)",
        "d (2 seeds, 1 unfinished, 1 unfinished run left out)",
        "c (3 seeds)",
    ]


def handles(axes):
    return {handle.get_linestyle() for handle in axes.get_legend().legend_handles}


def test_an_agent_without_training_has_a_dashed_line_over_the_panel():
    random = Group("random", "T-v0", [Curve.of_points([0], [value]) for value in (1.0, 2.0, 6.0)])
    (axes,) = learning_curves([group("a"), random], "x").axes
    learned, level = axes.lines
    assert level.get_xdata() == [0, 1]
    assert level.get_transform() == axes.get_yaxis_transform(which="grid")
    assert set(level.get_ydata()) == {3.0}
    assert level.get_linestyle() == "--" != learned.get_linestyle()
    (box,) = axes.patches
    assert 1 <= box.get_y() < 3 < box.get_y() + box.get_height() <= 6
    assert handles(axes) == {"-", "--"}
    assert axes.get_xlim()[1] == learning_curves([group("a")], "x").axes[0].get_xlim()[1]


def test_an_agent_without_training_and_with_one_seed_has_no_band():
    (axes,) = learning_curves([Group("random", "T-v0", [Curve.of_points([0], [2.0])])], "x").axes
    assert (len(axes.lines), len(axes.patches)) == (1, 0)


def test_a_single_evaluation_of_a_training_is_a_point():
    (axes,) = learning_curves([group("a", steps=(10,))], "x").axes
    assert axes.lines[0].get_xdata().tolist() == [10]
    assert axes.lines[0].get_linestyle() == "-"


def test_a_killed_training_with_a_value_at_step_0_is_no_agent_without_training():
    killed = Group("a", "T-v0", [Curve.of_points([0], [2.0])], 1, finished=[False])
    (axes,) = learning_curves([killed], "x").axes
    assert axes.lines[0].get_xydata().tolist() == [[0, 2]]
    assert handles(axes) == {"-"}


def test_an_agent_that_is_trained_on_one_of_two_tasks_has_a_solid_line_on_both():
    start = Group("a", "S-v0", [Curve.of_points([0], [2.0])])
    for groups in ([group("a"), start], [start, group("a")]):
        figure = learning_curves(groups, "x")
        assert [axes.lines[0].get_linestyle() for axes in figure.axes] == ["-", "-"]


@pytest.mark.parametrize("every", [1, 2, 8])
def test_styles_of_agents_without_training_differ_from_all_others(every):
    """Each ``every``-th agent is not trained; labels i and i + 7 share a color."""
    steps = [(0,) if i % every == 0 else (10, 20) for i in range(MAX_LINES)]
    styles = line_styles([group(f"g{i}", 1, steps=each) for i, each in enumerate(steps)])
    assert len({(style["color"], style["linestyle"]) for style in styles.values()}) == MAX_LINES
    dashed = {label for label, style in styles.items() if style["linestyle"] not in LINE_STYLES}
    assert dashed == {f"g{i}" for i in range(0, MAX_LINES, every)}


@pytest.mark.parametrize("tasks", ["T", "TS"])
def test_lines_of_a_legend_are_as_long_as_the_longest_pattern_of_dashes(tasks):
    figure = learning_curves([group("a", task=task) for task in tasks], "x")
    (legend,) = [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]
    (text,) = legend.get_texts()
    (line,) = legend.legend_handles
    longest = max(sum(dashes) for _, dashes in UNTRAINED_STYLES) * line.get_linewidth()
    assert legend.handlelength * text.get_fontsize() >= longest


def test_all_styles_differ():
    styles = line_styles([group(f"g{i}") for i in range(MAX_LINES)])
    assert len({(style["color"], style["linestyle"]) for style in styles.values()}) == MAX_LINES


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "1 to 28 groups, got 0"),
        ([group(f"g{i}", 1) for i in range(MAX_LINES + 1)], "1 to 28 groups, got 29"),
        ([group("a", 1, task=f"{i}") for i in range(MAX_PANELS + 1)], "at most 24 tasks, got 25"),
    ],
    ids=["none", "lines", "tasks"],
)
@pytest.mark.parametrize("draw", [learning_curves, final_score_figure])
def test_figures_that_nobody_can_read_are_refused(draw, groups, message):
    with pytest.raises(ValueError, match=message):
        draw(groups, "x")


TITLE = "rlxf/StitchingMazeDiscrete-v0, corridor_length=50, active=True, observation=MASKED"


def extents(figure, choose):
    """Draw a figure, and return the boxes of the texts that are chosen of each of its panels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [text.get_window_extent(canvas.get_renderer()) for axes in figure.axes for text in choose(axes)]


@pytest.mark.parametrize("draw", [learning_curves, final_score_figure])
@pytest.mark.parametrize("tasks", [1, 2])
def test_titles_are_inside_of_the_figure(draw, tasks):
    figure = draw([group("a" * 60, task=f"{TITLE} {task}") for task in range(tasks)], "x")
    for box in extents(figure, lambda axes: [axes.title]):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_labels_of_final_scores_do_not_touch():
    figure = final_score_figure([group(f"{i} {'word ' * 15}") for i in range(MAX_LINES)], "x")
    boxes = extents(figure, lambda axes: axes.get_yticklabels())
    assert all(above.y0 > below.y1 + 2 for above, below in pairwise(boxes))


def test_final_scores_have_a_row_for_each_group():
    figure = final_score_figure([group("a"), group("b", 1), group("a", task="S-v0")], "x", last=2)
    names = [[text.get_text().split()[0] for text in axes.get_yticklabels()] for axes in figure.axes]
    assert names == [["a", "b"], ["a"]]
    assert figure.axes[0].get_xlabel() == "x, mean of the last 2 values"
    assert figure.axes[0].get_ylim()[0] > figure.axes[0].get_ylim()[1]  # the first group is at the top


def test_profiles_begin_at_one_and_end_at_zero():
    scores = {"a": [[0.1, 0.5], [0.3]], "b": [[1.0, 0.2], [0.4]]}
    (axes,) = performance_profile_figure(scores).axes
    for line, tasks in zip(axes.lines, scores.values(), strict=True):
        assert line.get_ydata()[[0, -1]].tolist() == [1, 0]
        assert line.get_ydata() == pytest.approx(performance_profile(tasks, line.get_xdata()).value)


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg", ".PNG"])
def test_figures_are_written_and_replace_files(tmp_path, suffix):
    path = tmp_path / f"plot{suffix}"
    path.write_text("old")
    save_figure(learning_curves([group("a")], "x"), path)
    start = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}[suffix.lower()]
    assert path.read_bytes().startswith(start)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if suffix == ".png":
        with Image.open(path) as image:
            assert image.width == 720


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "target.png").write_text("old")
    (tmp_path / "link.png").symlink_to(tmp_path / "target.png")
    save_figure(learning_curves([group("a")], "x"), tmp_path / "link.png")
    assert (tmp_path / "target.png").read_text() == "old"
    assert not (tmp_path / "link.png").is_symlink()


@pytest.mark.parametrize("label", ["$x_1$", "_hidden", r"\$", "a $ b $ c", "${", "%s {0} \\frac", "x" * 300])
def test_texts_of_strangers_are_drawn_as_they_are(tmp_path, label):
    figure = learning_curves([group(label, task=label), group("other", task=label)], label)
    save_figure(figure, tmp_path / "plot.png")
    assert len(legend(figure)) == 2
    save_figure(final_score_figure([group(label, task=label)], label), tmp_path / "plot.png")


def test_plain_texts_have_no_formula():
    assert plain("a$b$_c") == r"a\$b\$_c"
    assert plain("_a") == " _a"
