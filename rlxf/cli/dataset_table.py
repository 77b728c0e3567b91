"""Table of Minari datasets."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.table import Column

from rlxf.utils.tables import WIDTH, Table

if TYPE_CHECKING:
    from rlxf.data import DatasetSummary

TEXTS = ("dataset", "environment")
NUMBERS = ("steps", "episodes", "return: min", "mean", "max", "MB")


def show_summaries(title: str, summaries: "Sequence[DatasetSummary]") -> None:
    """Print one row per dataset. Ids are never wrapped, so that they can be copied.

    The table has a frame if the output is a terminal that is wide enough. Otherwise the title and plain
    columns are printed, with one line per dataset that begins with its id.
    """
    console = Console(markup=False, highlight=False)
    framed = _table(summaries, HEAVY_HEAD, title=title)
    if console.is_terminal and _width(framed, console) <= console.width:
        console.print(framed)
    else:
        console.print(f"{title}\n{_table(summaries, None, pad_edge=False)}", soft_wrap=True)


def row(summary: "DatasetSummary") -> list[str]:
    """Return the cells of a dataset, one for each of `TEXTS` and `NUMBERS`.

    "(JPEG)" follows the environment if images are stored with lossy compression.
    """
    returns = (summary.returns.min(), summary.returns.mean(), summary.returns.max())
    return [
        summary.id,
        (summary.environment or "unknown") + " (JPEG)" * summary.lossy_images,
        f"{summary.lengths.sum():,}",
        f"{len(summary.lengths):,}",
        *(f"{value:,.1f}" for value in returns),
        f"{summary.size / 1e6:.1f}",
    ]


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=WIDTH)).maximum


def _table(summaries: "Sequence[DatasetSummary]", box: Box | None, **options: Any) -> Table:
    texts = [Column(name, no_wrap=True) for name in TEXTS]
    numbers = [Column(name, justify="right", no_wrap=True) for name in NUMBERS]
    table = Table(*texts, *numbers, box=box, **options)
    for summary in summaries:
        table.add_row(*row(summary))
    return table
