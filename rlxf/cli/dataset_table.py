"""The table of Minari datasets that commands show."""

from typing import TYPE_CHECKING

from rich.table import Column, Table

if TYPE_CHECKING:
    from rlxf.envs.trajectories import DatasetSummary

TEXTS = ("dataset", "environment")
NUMBERS = ("steps", "episodes", "return: min", "mean", "max", "MB")


def empty_table(title: str) -> Table:
    """Its columns. On a narrow screen names go on in the next line: they are there to be copied."""
    texts = [Column(name, overflow="fold") for name in TEXTS]
    numbers = [Column(name, justify="right", no_wrap=True) for name in NUMBERS]
    return Table(*texts, *numbers, title=title)


def row(summary: "DatasetSummary") -> list[str]:
    """One dataset, a text for each of `TEXTS` and `NUMBERS`, and (JPEG) where that is how its images are."""
    returns = (summary.returns.min(), summary.returns.mean(), summary.returns.max())
    return [
        summary.id,
        (summary.environment or "unknown") + " (JPEG)" * summary.lossy_images,
        f"{summary.lengths.sum():,}",
        f"{len(summary.lengths):,}",
        *(f"{value:,.1f}" for value in returns),
        f"{summary.size / 1e6:.1f}",
    ]
