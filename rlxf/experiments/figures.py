"""Figures of groups of runs: learning curves, final scores, performance profiles.

All figures are matplotlib figures without pyplot. The colors are those of Okabe and Ito 2008, "Color
Universal Design", which color-blind readers can tell apart. More than seven lines also differ by their style.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from rlxf.evaluation.aggregates import mean_score, performance_profile
from rlxf.experiments.comparison import by_task, describe_unfinished, final_scores
from rlxf.experiments.curves import Curve, band, common_grid, interpolate
from rlxf.experiments.groups import Group
from rlxf.utils.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":", "-.")
FORMATS = (".png", ".pdf", ".svg")
"""Suffixes of the files of figures."""
UNTRAINED_STYLES = ((0, (9, 3)), (0, (9, 3, 3, 3)), (0, (9, 3, 1, 3)), (0, (9, 3, 1, 3, 1, 3)))
"""Styles of the lines of agents without training: longer dashes than those of `LINE_STYLES`."""
MAX_LINES = len(COLORS) * len(LINE_STYLES)
MAX_PANELS = 24
DPI = 120
PANEL = (6.0, 4.2)
"""Size of a single panel in inches, 720 by 504 pixels."""
SMALL_PANEL = (4.5, 3.1)
"""Size of each of several panels in inches, of which two are in a row."""
INSIDE = 4
"""Largest number of lines with a legend inside of a single panel."""
HANDLE_LENGTH = 4
"""Length of the lines of a legend in font sizes, which shows each of `UNTRAINED_STYLES` once."""
LABEL_WIDTH = 34
"""Characters in a line of a label."""
TITLE_WIDTH = 60
"""Characters in a line of the title of a panel with the width of `PANEL`."""
SMALL_TITLE_WIDTH = 42
"""Characters in a line of the title of a panel with the width of `SMALL_PANEL`, or next to long labels."""
LINE_HEIGHT = 0.17
"""Height of a line of a legend in inches."""
TICK_LINE_HEIGHT = 0.15
"""Height of a line of the label of a row in inches."""
MIN_ROW_HEIGHT = 0.45
"""Minimum height of a row of final scores in inches."""
PROFILE_POINTS = 201
"""Number of thresholds of a performance profile, from the lowest to the highest score."""
SINGLE_POINT = 5
"""Width of the interval of a line that is a single point."""
NO_BREAK = "\N{NO-BREAK SPACE}"


def learning_curves(groups: Sequence[Group], metric: str) -> Figure:
    """Plot the mean of each group over the steps, with its 95% interval over seeds; a panel for each task.

    A line ends at the last step that all seeds of its group reached, where a training that ended early keeps
    its last value (`Group.lines`). A group with one seed has no interval, and the legend says so. The legend
    has the number of unfinished trainings, too. An agent without training, whose curves have one value at
    step 0 in all panels, has a dashed line over the whole panel.

    Args:
        groups: groups of one or several tasks.
        metric: name of the metric.

    Raises:
        ValueError: if there is no group, or there are more groups or tasks than a figure can show.
    """
    tasks = by_task(groups)
    styles = line_styles(groups)
    untrained = _untrained(groups)
    columns = min(2, len(tasks))
    width, height = PANEL if columns == 1 else SMALL_PANEL
    title_width = TITLE_WIDTH if columns == 1 else SMALL_TITLE_WIDTH
    figure, panels = _panels(len(tasks), columns, width, height)
    for (task, members), axes in zip(tasks.items(), panels, strict=True):
        for group in members:
            draw = _draw_level if group.label in untrained else _draw_curve
            draw(axes, group.lines(metric), styles[group.label])
        axes.set(xlabel=" or ".join(dict.fromkeys(group.unit for group in members)), ylabel=plain(metric))
        axes.set_title(fill(plain(task), title_width), fontsize="medium")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.grid(alpha=0.3)
    _add_legend(figure, panels, styles, _labels_with_seeds(groups))
    return figure


def final_score_figure(groups: Sequence[Group], metric: str, last: int = 1) -> Figure:
    """Plot the mean final score of each group with its 95% interval over seeds; a panel for each task.

    Small points are the scores of the seeds.

    Args:
        groups: groups of one or several tasks.
        metric: name of the metric.
        last: number of values at the end of a curve whose mean is the score.

    Raises:
        ValueError: if there is no group, or there are more groups or tasks than a figure can show.
    """
    tasks = by_task(groups)
    styles = line_styles(groups)
    height = 1.2 + _row_height(groups) * max(map(len, tasks.values()))
    figure, panels = _panels(len(tasks), 1, PANEL[0], height)
    for (task, members), axes in zip(tasks.items(), panels, strict=True):
        for row, group in enumerate(members):
            _draw_scores(axes, row, final_scores(group, last), styles[group.label]["color"])
        names = [_with_seeds(group.label, [group]) for group in members]
        axes.set_yticks(range(len(members)), names, fontsize="small")
        axes.set_ylim(len(members) - 0.5, -0.5)
        axes.set_xlabel(plain(metric if last == 1 else f"{metric}, mean of the last {last} values"))
        axes.set_title(fill(plain(task), SMALL_TITLE_WIDTH), fontsize="medium")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="x", alpha=0.3)
    return figure


def _row_height(groups: Sequence[Group]) -> float:
    """Return the height of a row of final scores in inches: the longest label, and one empty line."""
    lines = max(1 + _with_seeds(group.label, [group]).count("\n") for group in groups)
    return max(MIN_ROW_HEIGHT, TICK_LINE_HEIGHT * (lines + 1))


def performance_profile_figure(scores: Mapping[str, Sequence[ArrayLike]]) -> Figure:
    """Plot the performance profile of each method with pointwise 95% intervals.

    Args:
        scores: label of a method -> for each task, its normalized scores as in `performance_profile`.

    Raises:
        ValueError: if there is no method, or there are more than a figure can show.
    """
    styles = _styles_of(list(scores))
    values = np.concatenate([_run_means(task) for tasks in scores.values() for task in tasks])
    margin = max(0.02 * float(np.ptp(values)), 1e-3)
    thresholds = np.linspace(values.min() - margin, values.max() + margin, PROFILE_POINTS)
    figure, (axes,) = _panels(1, 1, *PANEL)
    for label, tasks in scores.items():
        found = performance_profile(tasks, thresholds)
        axes.plot(thresholds, found.value, **styles[label])
        axes.fill_between(thresholds, found.low, found.high, color=styles[label]["color"], alpha=0.2, lw=0)
    axes.set(xlabel="normalized score τ", ylabel="fraction of runs with score > τ", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    _add_legend(figure, [axes], styles, {label: fill(plain(label), LABEL_WIDTH) for label in scores})
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure atomically to a file, replacing an existing one; the suffix determines the format.

    Raises:
        OSError: if the file cannot be written; an existing file is then unchanged.
    """
    content = BytesIO()
    figure.savefig(content, format=Path(path).suffix.lower().removeprefix("."))
    write_file(path, content.getbuffer())


def plain(text: str) -> str:
    """Return a text that matplotlib draws as it is: ``$`` begins no formula, and ``_`` hides no label."""
    return f"{' ' * text.startswith('_')}{text}".replace("$", r"\$")


def line_styles(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Return label -> color and style of the line of a group, the same in all panels."""
    return _styles_of(list(dict.fromkeys(group.label for group in groups)), _untrained(groups))


def _styles_of(labels: Sequence[str], untrained: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    if not 0 < len(labels) <= MAX_LINES:
        raise ValueError(
            f"a figure shows 1 to {MAX_LINES} groups, got {len(labels)}; choose fewer runs, or join groups"
        )
    styles: dict[str, dict[str, Any]] = {}
    for row, label in enumerate(labels):
        lines = UNTRAINED_STYLES if label in untrained else LINE_STYLES
        styles[label] = {"color": COLORS[row % len(COLORS)], "linestyle": lines[row // len(COLORS)]}
    return styles


def _panels(count: int, columns: int, width: float, height: float) -> tuple[Figure, list["Axes"]]:
    """Return a figure with ``count`` panels, each of this width and height in inches."""
    if count > MAX_PANELS:
        raise ValueError(f"a figure shows at most {MAX_PANELS} tasks, got {count}; choose fewer runs")
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * width, rows * height), dpi=DPI, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in grid[count:]:
        unused.remove()
    return figure, list(grid[:count])


def _draw_curve(axes: "Axes", curves: Sequence[Curve], style: Mapping[str, Any]) -> None:
    grid = common_grid(curves)
    if not len(grid):
        return
    found = band(interpolate(curves, grid))
    axes.plot(grid, found.value, marker="o" if len(grid) == 1 else None, **style)
    if len(curves) > 1:
        width = SINGLE_POINT if len(grid) == 1 else 0
        axes.fill_between(grid, found.low, found.high, color=style["color"], alpha=0.2, linewidth=width)


def _untrained(groups: Sequence[Group]) -> set[str]:
    """Return the labels of the agents that do not learn: all their groups are `_is_untrained`."""
    return {group.label for group in groups} - {group.label for group in groups if not _is_untrained(group)}


def _is_untrained(group: Group) -> bool:
    """Return whether the agent of a group does not learn: its curves have one value, at step 0.

    A training that was killed may have no other value either, so all curves must be those of finished runs.
    """
    return all(group.finished) and all(curve.steps.tolist() == [0] for curve in group.curves)


def _draw_level(axes: "Axes", curves: Sequence[Curve], style: Mapping[str, Any]) -> None:
    """Draw the mean of curves with one value each, and its interval, over the width of a panel."""
    found = band([curve.values for curve in curves])
    axes.axhline(found.value[0], **style)
    if len(curves) > 1:
        axes.axhspan(found.low[0], found.high[0], color=style["color"], alpha=0.2, linewidth=0)


def _draw_scores(axes: "Axes", row: int, scores: NDArray[np.float64], color: str) -> None:
    mean = mean_score([scores])
    axes.plot(scores, np.full(len(scores), row), ".", color=color, alpha=0.4, markersize=5)
    if len(scores) > 1:
        axes.plot(
            [mean.low, mean.high], [row, row], color=color, linewidth=6, alpha=0.35, solid_capstyle="butt"
        )
    axes.plot([mean.value], [row], "D", color=color, markersize=6)


def _add_legend(
    figure: Figure,
    panels: Sequence["Axes"],
    styles: Mapping[str, Mapping[str, Any]],
    labels: Mapping[str, str],
) -> None:
    """Add the legend of all lines: inside of a single panel with few lines, else below the panels."""
    handles = [Line2D([], [], **style) for style in styles.values()]
    names = [labels[label] for label in styles]
    options: dict[str, Any] = {"fontsize": "small", "handlelength": HANDLE_LENGTH}
    if len(panels) == 1 and len(styles) <= INSIDE:
        panels[0].legend(handles, names, framealpha=0.7, **options)
        return
    width, height = figure.get_size_inches()
    lines = sum(1 + name.count("\n") for name in names)
    figure.set_size_inches(width, height + LINE_HEIGHT * (lines / 2 + 1))
    figure.legend(handles, names, loc="outside lower center", ncols=2, **options)


def _labels_with_seeds(groups: Sequence[Group]) -> dict[str, str]:
    """Return label -> label with the numbers of seeds, which may differ between tasks."""
    members: dict[str, list[Group]] = {}
    for group in groups:
        members.setdefault(group.label, []).append(group)
    return {label: _with_seeds(label, each) for label, each in members.items()}


def _with_seeds(label: str, groups: Sequence[Group]) -> str:
    """Return a label with the numbers of seeds and of unfinished trainings of its groups."""
    counts = [len(group.curves) for group in groups]
    low, high = min(counts), max(counts)
    if high == 1:
        seeds = "1 seed, no interval"
    else:
        seeds = f"{high} seeds" if low == high else f"{low} to {high} seeds"
    parts = [seeds, *describe_unfinished(groups)]
    counted = ", ".join(part.replace(" ", NO_BREAK) for part in parts)
    return fill(plain(f"{label} ({counted})"), LABEL_WIDTH)


def _run_means(scores: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(scores, np.float64)
    return table if table.ndim == 1 else table.mean(axis=1)
