"""Statistics over seeds and tasks with bootstrap intervals, by Agarwal et al. 2021, arXiv:2108.13264.

The scores of a method are one table for each task m of M: (N,) scores of N runs, which differ by their seed,
or (N, E) returns of E episodes of each run. The score x_mn of a run is the mean over its episodes, as in the
paper. The intervals are those of a stratified bootstrap: in each of 9,999 resamples and for each task, N
runs are drawn with replacement (section 4.1), and then E episodes of each drawn run. The tasks stay as they
are. The second stage makes intervals of few runs wider, which are too narrow otherwise. It counts the
variation between episodes twice, because the scores of runs contain it; with few and noisy episodes, the
intervals then cover more than 95%, and those of nonlinear statistics are shifted. With one run of each
task and one episode, an interval has width 0, and is not meaningful.

Scores of different tasks have different scales. Normalize them before, e.g. with reference scores.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import scipy  # its submodules load lazily; scipy.stats takes a second
from numpy.typing import ArrayLike, NDArray

from rlxf.evaluation.intervals import (
    TRIM,
    Band,
    Interval,
    as_scores,
    check_strata,
    in_batches,
    resample_stratum,
)

RunScores = Sequence[NDArray[np.float64]]
"""For each task, the scores of its runs in a batch of resamples, (count, N)."""
Statistic = Callable[[RunScores], NDArray[np.float64]]
"""Function of the scores of a batch -> values (count, ...)."""
Reduction = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Function of the scores of the episodes of a batch, (count, N, E) -> scores of the runs, (..., count, N)."""
TIE = 1e-12
"""Difference up to which the scores of two runs are equal, relative to the mean absolute score of their
episodes. It exceeds the rounding error of a mean of float64 numbers."""


def mean_score(scores: Sequence[ArrayLike], seed: int = 0) -> Interval:
    """Return the mean over tasks of the mean over runs, 1/M sum_m 1/N_m sum_n x_mn, with its 95% interval.

    Args:
        scores: for each task, scores (N,) or (N, E).
        seed: seed of the resamples.

    Raises:
        ValueError: if there is no task, a task has no score, its runs have different numbers of episodes, or
            a score is NaN or infinite.
    """
    return _interval(scores, _mean_of_tasks, seed)


def _mean_of_tasks(runs: RunScores) -> NDArray[np.float64]:
    means: NDArray[np.float64] = _task_means(runs).mean(axis=1)
    return means


def median_over_tasks(scores: Sequence[ArrayLike], seed: int = 0) -> Interval:
    """Return the median over tasks of the mean over runs, with its 95% interval.

    It ignores the scores of nearly half of the tasks, and its intervals are wide; prefer the interquartile
    mean. With one task it is the mean.

    Source: Agarwal et al. 2021, section 2.

    Args:
        scores: for each task, scores (N,) or (N, E).
        seed: seed of the resamples.

    Raises:
        ValueError: as in `mean_score`.
    """
    return _interval(scores, _median_of_tasks, seed)


def _median_of_tasks(runs: RunScores) -> NDArray[np.float64]:
    medians: NDArray[np.float64] = np.median(_task_means(runs), axis=1)
    return medians


def median_over_runs(scores: Sequence[ArrayLike], seed: int = 0) -> Interval:
    """Return the median of all runs of all tasks, with its 95% interval.

    Args:
        scores: for each task, scores (N,) or (N, E).
        seed: seed of the resamples.

    Raises:
        ValueError: as in `mean_score`.
    """
    return _interval(scores, _median_of_runs, seed)


def _median_of_runs(runs: RunScores) -> NDArray[np.float64]:
    medians: NDArray[np.float64] = np.median(np.concatenate(runs, axis=1), axis=1)
    return medians


def interquartile_mean_over_runs(scores: Sequence[ArrayLike], seed: int = 0) -> Interval:
    """Return the mean of all runs of all tasks without the lowest and highest 25%, with its 95% interval.

    It is `interquartile_mean` of the scores x_mn. `stratified_interquartile_mean` trims episodes instead of
    runs. If tasks have different numbers of runs N_m, a run weighs 1/N_m, so that tasks count equally,
    and a quarter of the weight is left out at each end.

    Source: Agarwal et al. 2021, section 4.3.

    Args:
        scores: for each task, scores (N,) or (N, E).
        seed: seed of the resamples.

    Raises:
        ValueError: as in `mean_score`.
    """
    return _interval(scores, _trimmed_mean, seed)


def _trimmed_mean(runs: RunScores) -> NDArray[np.float64]:
    """Return the interquartile means of a batch, (count,)."""
    scores = np.concatenate(runs, axis=1)
    means: NDArray[np.float64]
    if len({each.shape[1] for each in runs}) == 1:
        means = scipy.stats.trim_mean(scores, TRIM, axis=1)
        return means
    weights = np.concatenate([np.full(each.shape[1], 1 / each.shape[1] / len(runs)) for each in runs])
    order = np.argsort(scores, axis=1)
    ends = np.cumsum(weights[order], axis=1).clip(TRIM, 1 - TRIM)
    means = (np.diff(ends, axis=1, prepend=TRIM) * np.take_along_axis(scores, order, axis=1)).sum(axis=1)
    return means / (1 - 2 * TRIM)


def optimality_gap(scores: Sequence[ArrayLike], gamma: float = 1.0, seed: int = 0) -> Interval:
    """Return the mean amount by which scores miss a threshold, with its 95% interval.

    The gap is gamma - 1/M sum_m 1/N_m sum_n min(x_mn, gamma). It is 0 if all scores reach gamma; scores
    beyond gamma do not compensate for lower ones. Lower is better.

    Source: Agarwal et al. 2021, section 4.3.

    Args:
        scores: for each task, scores (N,) or (N, E).
        gamma: the threshold; 1 is an expert for scores that are normalized to 1.
        seed: seed of the resamples.

    Raises:
        ValueError: as in `mean_score`, or if gamma is NaN or infinite.
    """
    _check_finite("gamma", [gamma])
    return _interval(scores, partial(_gap, gamma=gamma), seed)


def _gap(runs: RunScores, gamma: float = 1.0) -> NDArray[np.float64]:
    return _mean_of_tasks([np.maximum(gamma - each, 0.0) for each in runs])


STATISTICS: dict[str, Statistic] = {
    "mean_score": _mean_of_tasks,
    "median_over_tasks": _median_of_tasks,
    "median_over_runs": _median_of_runs,
    "interquartile_mean_over_runs": _trimmed_mean,
    "optimality_gap": _gap,
}
"""Statistics of `intervals_of` by the names of the functions that return one of them."""


def intervals_of(scores: Sequence[ArrayLike], names: Sequence[str], seed: int = 0) -> dict[str, Interval]:
    """Return several statistics with their intervals by name, all from the same resamples.

    They equal the results of the functions with these names, each of which draws the same resamples again.

    Args:
        scores: for each task, scores (N,) or (N, E).
        names: names in `STATISTICS`, at least one; the threshold of `optimality_gap` is its default, 1.
        seed: seed of the resamples.

    Raises:
        ValueError: as in `mean_score`.
    """

    def each(runs: RunScores) -> NDArray[np.float64]:
        return np.stack([STATISTICS[name](runs) for name in names], axis=1)

    tables = _tables(scores)
    values = each([_means(table[None]) for table in tables])[0].tolist()
    resampled = _resampled(tables, each, seed, 0).T
    return {name: Interval.of_resamples(*pair) for name, *pair in zip(names, values, resampled, strict=True)}


def probability_of_improvement(x: Sequence[ArrayLike], y: Sequence[ArrayLike], seed: int = 0) -> Interval:
    """Return the probability that a run of X scores higher than one of Y, with its 95% interval.

    P(X > Y) = 1/M sum_m P(X_m > Y_m), where P(X_m > Y_m) = 1/(N K) sum_i sum_j S(x_mi, y_mj), and S is 1 if
    x > y, 1/2 if x = y, and 0 otherwise. N K P is the Mann-Whitney U statistic. The value is 1/2 for equal
    methods, and does not measure the size of an improvement. Runs of X and Y are resampled independently.

    The means of equal episodes in another order or number differ by rounding. Two runs therefore are equal
    if their scores differ by at most 1e-12 of the mean absolute score of the episodes of one of them.

    Source: Agarwal et al. 2021, section 4.3, and Mann and Whitney 1947, "On a test of whether one of two
    random variables is stochastically larger than the other".

    Args:
        x: for each task, scores (N,) or (N, E) of method X.
        y: for each task in the same order, scores (K,) or (K, E) of method Y.
        seed: seed of the resamples.

    Raises:
        ValueError: as in `mean_score`, or if x and y have different numbers of tasks.
    """
    if len(x) != len(y):
        raise ValueError(f"x and y must have the same tasks, got {len(x)} and {len(y)} tasks")
    tables, others = _tables(x), _tables(y)
    tasks = len(x)
    pairs = sum(len(a) * len(b) for a, b in zip(tables, others, strict=True))

    def probability(runs: RunScores) -> NDArray[np.float64]:
        each = [_win_rate(a, b) for a, b in zip(runs[:tasks], runs[tasks:], strict=True)]
        return np.stack(each, axis=1).mean(axis=1)

    return _interval([*tables, *others], probability, seed, 2 * pairs, _means_and_magnitudes)


def _means_and_magnitudes(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means over episodes (count, N, E) of scores and of their absolute values, (2, count, N)."""
    return np.stack([table.mean(axis=2), np.abs(table).mean(axis=2)])


def _win_rate(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of S(x_i, y_j) over all pairs of x (2, count, N) and y (2, count, K) -> (count,)."""
    (scores, size), (others, other_size) = x[..., None], y[:, :, None, :]
    difference = scores - others
    difference[np.abs(difference) <= TIE * np.maximum(size, other_size)] = 0
    rate: NDArray[np.float64] = 0.5 + 0.5 * np.sign(difference).mean(axis=(1, 2))
    return rate


def performance_profile(scores: Sequence[ArrayLike], thresholds: ArrayLike, seed: int = 0) -> Band:
    """Return the fraction of runs with a score above each threshold tau, with pointwise 95% intervals.

    F(tau) = 1/M sum_m 1/N_m sum_n 1[x_mn > tau], the tail distribution of the scores. It does not increase
    with tau. A method whose profile is above that of another one everywhere is stochastically better.

    Source: Agarwal et al. 2021, section 4.2.

    Args:
        scores: for each task, scores (N,) or (N, E).
        thresholds: thresholds tau (n,).
        seed: seed of the resamples.

    Raises:
        ValueError: as in `mean_score`, or if a threshold is NaN or infinite, or there is none.
    """
    tau = np.asarray(thresholds, np.float64)
    _check_finite("thresholds", tau)
    tables = _tables(scores)

    def above(runs: RunScores) -> NDArray[np.float64]:
        return np.mean([(each[:, :, None] > tau).mean(axis=1) for each in runs], axis=0)

    resampled = _resampled(tables, above, seed, tau.size * max(len(table) for table in tables))
    return Band.of_resamples(above([_means(table[None]) for table in tables])[0], resampled)


def _means(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the means over episodes, (count, N, E) -> (count, N)."""
    means: NDArray[np.float64] = table.mean(axis=2)
    return means


def _interval(
    scores: Sequence[ArrayLike],
    statistic: Statistic,
    seed: int,
    numbers: int = 0,
    reduce: Reduction = _means,
) -> Interval:
    """Return a statistic of the scores with its 95% interval.

    Args:
        scores: for each task, scores (N,) or (N, E).
        statistic: function of the scores of runs.
        seed: seed of the resamples.
        numbers: number of values that ``statistic`` takes for one resample, besides the scores.
        reduce: function that computes the scores of runs from those of their episodes.
    """
    tables = _tables(scores)
    value = float(statistic([reduce(table[None]) for table in tables])[0])
    return Interval.of_resamples(value, _resampled(tables, statistic, seed, numbers, reduce))


def _resampled(
    tables: Sequence[NDArray[np.float64]],
    statistic: Statistic,
    seed: int,
    numbers: int,
    reduce: Reduction = _means,
) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)

    def resample(count: int) -> NDArray[np.float64]:
        return statistic([reduce(resample_stratum(table, count, rng)) for table in tables])

    return in_batches(resample, numbers + sum(table.size for table in tables))


def _tables(scores: Sequence[ArrayLike]) -> list[NDArray[np.float64]]:
    """Return the scores of each task as a table (N, E); scores (N,) are N runs of one episode."""
    arrays = [as_scores(task) for task in scores]
    tables = [array[:, None] if array.ndim == 1 else array for array in arrays]
    check_strata(tables)
    return tables


def _task_means(runs: RunScores) -> NDArray[np.float64]:
    """Return the mean over the runs of each task, (count, M)."""
    return np.stack([each.mean(axis=1) for each in runs], axis=1)


def _check_finite(name: str, values: ArrayLike) -> None:
    array = np.asarray(values, np.float64)
    if not array.size or not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite numbers, got {array.tolist()}")
