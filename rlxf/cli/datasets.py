"""``rlxf datasets``: what there is to learn from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Column, Table

from rlxf.cli.screen import show

if TYPE_CHECKING:
    from rlxf.envs.trajectories import DatasetSummary

TEXTS = ("dataset", "environment")
NUMBERS = ("steps", "episodes", "return: min", "mean", "max", "MB")


@dataclass(frozen=True)
class Datasets:
    """List the Minari datasets on this machine, with their steps, episodes and returns.

    Example: rlxf datasets
    """

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        return show_datasets


def show_datasets() -> None:
    """Print a row for each dataset, and below them what is wrong with those that cannot be read."""
    from rlxf.envs.trajectories import DatasetError, local_folder, local_ids, summarize

    table, faults = empty_table(f"datasets in {local_folder()}"), []
    for dataset_id in local_ids():
        try:
            table.add_row(*row(summarize(dataset_id)))
        except DatasetError as error:
            faults.append(f"{dataset_id} cannot be read: {error}")
    show(table if table.rows else f"no datasets in {local_folder()}; minari download ID fetches one")
    for fault in faults:
        show(fault)


def empty_table(title: str) -> Table:
    """Its columns. On a narrow screen names go on in the next line: they are there to be copied."""
    texts = [Column(name, overflow="fold") for name in TEXTS]
    numbers = [Column(name, justify="right", no_wrap=True) for name in NUMBERS]
    return Table(*texts, *numbers, title=title)


def row(summary: "DatasetSummary") -> list[str]:
    """One dataset, a text for each of `TEXTS` and `NUMBERS`."""
    returns = (summary.returns.min(), summary.returns.mean(), summary.returns.max())
    return [
        summary.id,
        summary.environment or "unknown",
        f"{summary.lengths.sum():,}",
        f"{len(summary.lengths):,}",
        *(f"{value:,.1f}" for value in returns),
        f"{summary.size / 1e6:.1f}",
    ]
