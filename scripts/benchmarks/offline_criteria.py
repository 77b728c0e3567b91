"""Criteria that offline methods should meet: compared with cloning, Decision Transformers and the data."""

from collections.abc import Sequence

import numpy as np

from benchmarks.offline_methods import METHODS
from benchmarks.offline_runs import DATA, Run
from rlxf.evaluation.intervals import interquartile_mean

BEST_CLONING, PLAIN = "bc-best", "dt"
"""Names of the methods that others are compared with."""
MARGIN = 10.0
"""Required difference from `PLAIN` on average, in points of the normalized score."""
CRITERIA = (
    *("method", "at least cloning of the best 10% on each", f"{MARGIN:g} points above DT on average"),
    "each seed at least the data",
)


def criteria(runs: Sequence[Run], datasets: Sequence[str]) -> list[list[str]]:
    """Return a row for each method that has runs on all datasets, see `CRITERIA`.

    Scores of a dataset are interquartile means over all episodes of all seeds. A cell has the answer and the
    difference that decides: the smallest one over the datasets, the mean over the datasets, and the smallest
    one between the mean of a seed and that of the data. It is empty if the other method has no runs.

    Args:
        runs: runs of methods with one preset, and of the data.
        datasets: Minari ids.
    """
    table = []
    for method in METHODS:
        groups = groups_of(runs, method, datasets)
        if all(groups):
            cloning, plain = (
                differences(groups, groups_of(runs, other, datasets)) for other in (BEST_CLONING, PLAIN)
            )
            answers = [
                verdict(min(cloning)) if cloning else "",
                verdict(float(np.mean(plain)), MARGIN) if plain else "",
                verdict(worst_seed(groups, groups_of(runs, DATA, datasets))),
            ]
            table.append([METHODS[method].title, *answers])
    return table


def groups_of(runs: Sequence[Run], method: str, datasets: Sequence[str]) -> list[list[Run]]:
    """Return the runs of a method on each dataset."""
    return [[run for run in runs if (run.method, run.dataset) == (method, each)] for each in datasets]


def differences(groups: Sequence[Sequence[Run]], others: Sequence[Sequence[Run]]) -> list[float]:
    """Return the difference of the scores on each dataset; empty if the others lack runs."""
    if not all(others):
        return []
    return [score(one) - score(other) for one, other in zip(groups, others, strict=True)]


def score(runs: Sequence[Run]) -> float:
    """Return the interquartile mean of the scores of all episodes of all runs."""
    return interquartile_mean(np.concatenate([run.scores for run in runs]))


def worst_seed(groups: Sequence[Sequence[Run]], of_data: Sequence[Sequence[Run]]) -> float:
    """Return the smallest difference between the mean of a run and that of the data, over all datasets."""
    return min(
        run.scores.mean() - data.scores.mean()
        for runs, (data,) in zip(groups, of_data, strict=True)
        for run in runs
    )


def verdict(difference: float, required: float = 0.0) -> str:
    """Return whether the difference is at least the required one, with the difference."""
    return f"{'yes' if difference >= required else 'no'} ({difference:+.1f})"
