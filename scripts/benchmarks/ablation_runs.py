"""Runs with one implementation detail changed, and their table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from benchmarks.result_cache import Jobs, run_missing


@dataclass(frozen=True)
class Run:
    """Result of one training run.

    Args:
        change: name of the change.
        task: name of the task.
        seed: random seed.
        curve: (environment steps or updates, score) of each evaluation.
        seconds: CPU time of the run, with its evaluations.
    """

    change: str
    task: str
    seed: int
    curve: list[tuple[int, float]]
    seconds: float

    @property
    def mean(self) -> float:
        """Mean score of all evaluations, which is higher the earlier the agent learns."""
        return mean(score for _, score in self.curve)


def print_runs(jobs: Jobs, processes: int, output: Path, details: Mapping[str, int]) -> None:
    """Make missing runs, see `run_missing`, and print the table of all of them."""
    runs = [Run(**run) for run in run_missing(jobs, processes, output).values()]
    Console(width=160).print(table(runs, details))


def table(runs: Sequence[Run], details: Mapping[str, int]) -> Table:
    """Return a table with a row for each change; ``details`` has the number of its detail, 0 for none."""
    tasks = list(dict.fromkeys(run.task for run in runs))
    columns = [column for task in tasks for column in (f"{task}: mean score", "last score")]
    result = Table("detail", "change", *columns)
    for row in rows(runs, details):
        result.add_row(*row)
    return result


def rows(runs: Sequence[Run], details: Mapping[str, int]) -> list[list[str]]:
    """Return the cells of each change: its number and name, and the scores of its seeds on each task."""
    tasks = list(dict.fromkeys(run.task for run in runs))
    runs, result = sorted(runs, key=lambda run: run.seed), []
    for name, detail in details.items():
        own = [[run for run in runs if (run.change, run.task) == (name, task)] for task in tasks]
        cells = [cell for each in own for cell in (_scores([x.mean for x in each]), _last(each))]
        result.append(["" if detail == 0 else str(detail), name, *cells])
    return [row for row in result if any(row[2:])]


def _scores(values: Sequence[float]) -> str:
    """Return the mean of some scores, and the scores in parentheses."""
    single = ", ".join(f"{value:.2f}" for value in values)
    return f"{mean(values):.2f} ({single})" if values else ""


def _last(runs: Sequence[Run]) -> str:
    """Return the last score of each run."""
    return ", ".join(f"{run.curve[-1][1]:.2f}" for run in runs)
