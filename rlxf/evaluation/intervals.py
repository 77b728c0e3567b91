"""Interquartile mean, bootstrap intervals over episodes and seeds, and intervals of rank correlations.

`rlxf.evaluation.aggregates` has further statistics over seeds and tasks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its submodules load lazily; scipy.stats takes a second
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
"""Confidence of the bootstrap intervals."""
RESAMPLES = 9999
"""Number of bootstrap resamples."""
MIN_PAIRS = 3
"""Smallest number of pairs with a rank correlation; with two, it can only be -1 or 1."""
_BATCH_NUMBERS = 2**20
"""Number of values that are resampled at a time, 8 MiB."""
TRIM = 0.25
"""Fraction of the values that the interquartile mean leaves out at each end."""


@dataclass(frozen=True)
class Interval:
    """Estimate with its 95% interval.

    Args:
        value: the estimate.
        low: lower end, at most ``value``.
        high: upper end, at least ``value``.
    """

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Return "value (low to high)" with the format of a number, e.g. ``f"{interval:.1f}"``."""
        value, low, high = (format(number, spec) for number in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"

    @classmethod
    def of_resamples(cls, value: float, resampled: NDArray[np.float64]) -> "Interval":
        """Return the percentile interval of an estimate from its values in resamples, (n,).

        Rounding errors and skewed resamples may put the estimate outside of the percentiles. The interval is
        then extended to it.
        """
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(resampled, (tail, 1 - tail))
        return cls(value, min(float(low), value), max(float(high), value))


@dataclass(frozen=True, eq=False)
class Band:
    """Estimates at n points with their pointwise 95% intervals.

    Args:
        value: float64 (n,), the estimates.
        low: float64 (n,), lower ends, at most ``value``.
        high: float64 (n,), upper ends, at least ``value``.
    """

    value: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @classmethod
    def of_resamples(cls, value: NDArray[np.float64], resampled: NDArray[np.float64]) -> "Band":
        """Return the percentile intervals of estimates (n,) from their values in resamples, (count, n).

        They are extended to the estimates as in `Interval.of_resamples`.
        """
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(resampled, (tail, 1 - tail), axis=0)
        return cls(value, np.minimum(low, value), np.maximum(high, value))


def interquartile_mean(x: np.ndarray) -> float:
    """Return the mean of x (n,) without its floor(n / 4) smallest and floor(n / 4) largest values.

    It is robust to outliers and needs fewer samples than the median.

    Source: Agarwal et al. 2021, arXiv:2108.13264, section 4.3.
    """
    return float(scipy.stats.trim_mean(x, TRIM))


def bootstrap_interval(x: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval (low, high) of the mean of x (n,), low <= mean <= high.

    The interval excludes the lowest and the highest 2.5% of the means of 9,999 samples, each of n values
    drawn from x with replacement. Equal values, or a single value, give an interval of width 0.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife".

    Args:
        x: values, at least one.
        seed: seed of the samples.
    """
    mean = float(np.mean(x))
    if np.ptp(x) == 0:
        return mean, mean
    result = scipy.stats.bootstrap(
        (x,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(1, _BATCH_NUMBERS // len(x)),
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    # Rounding errors may put the mean of nearly equal values outside the interval.
    return min(float(low), mean), max(float(high), mean)


def stratified_interquartile_mean(strata: Sequence[ArrayLike], seed: int = 0) -> Interval:
    """Return the interquartile mean of all scores, with its 95% interval over seeds and episodes.

    The percentile interval is that of 9,999 resamples. In each resample and for each stratum of S agents, S
    agents are drawn with replacement, and then E episodes of each drawn agent, with replacement. The
    interval therefore contains the variation between trainings and that between episodes, but not that
    between strata, which stay as they are. It is wider than needed if trainings differ less than their
    episodes, see `rlxf.evaluation.aggregates`.

    Source: Agarwal et al. 2021, arXiv:2108.13264, section 4.3 (interquartile mean of all runs and tasks) and
    4.1 (stratified bootstrap). Their runs are means over episodes; here, episodes are resampled, too (Davison
    and Hinkley 1997, "Bootstrap Methods and their Application", section 3.8).

    Args:
        strata: for each stratum, such as a dataset, its scores (S, E): seeds of the training by episodes.
        seed: seed of the resamples.

    Raises:
        ValueError: if there is no stratum, one of them is not a table with at least one value, or a score is
            NaN or infinite.
    """
    tables = [as_scores(stratum) for stratum in strata]
    check_strata(tables)
    value = interquartile_mean(_pooled(tables))
    rng = np.random.default_rng(seed)

    def resample(count: int) -> NDArray[np.float64]:
        each = [resample_stratum(table, count, rng).reshape(count, -1) for table in tables]
        drawn = np.concatenate(each, axis=1)
        means: NDArray[np.float64] = scipy.stats.trim_mean(drawn, TRIM, axis=1)
        return means

    return Interval.of_resamples(value, in_batches(resample, sum(table.size for table in tables)))


def as_scores(stratum: ArrayLike) -> NDArray[np.float64]:
    """Return the scores of a stratum as an array; raise ValueError unless they are numbers that form one."""
    try:
        return np.asarray(stratum, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "scores must be numbers, and each row of a table must have the same number of episodes; if runs "
            "have different numbers of episodes, use rlxf.evaluation.aggregates with the mean of each run"
        ) from error


def check_strata(tables: Sequence[NDArray[np.float64]]) -> None:
    """Raise ValueError unless there are tables (S, E), each with at least one value, and all are finite."""
    shapes = [table.shape for table in tables]
    if not tables or any(table.ndim != 2 or not table.size for table in tables):
        raise ValueError(
            f"each stratum must be a table (seeds, episodes) with at least one value, got shapes {shapes}"
        )
    values = _pooled(tables)
    if not np.isfinite(values).all():
        raise ValueError(f"scores must be finite, got {values[~np.isfinite(values)][0]}")


def _pooled(tables: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([table.ravel() for table in tables])


def resample_stratum(table: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw agents of a table (S, E) and episodes of each drawn agent, ``count`` times -> (count, S, E)."""
    seeds, episodes = table.shape
    agent = rng.integers(seeds, size=(count, seeds, 1))
    place = rng.integers(episodes, size=(count, seeds, episodes))
    place += agent * episodes  # one index into the whole table is faster than two
    return table.take(place)


def in_batches(resample: Callable[[int], NDArray[np.float64]], numbers: int) -> NDArray[np.float64]:
    """Return the values of `RESAMPLES` resamples of ``numbers`` values each, in batches of limited memory.

    Args:
        resample: function that returns the values of this many resamples, (count, ...).
        numbers: number of values that one resample takes while it is computed.
    """
    batch = max(1, _BATCH_NUMBERS // numbers)
    counts = [min(batch, RESAMPLES - first) for first in range(0, RESAMPLES, batch)]
    return np.concatenate([resample(count) for count in counts])


def rank_correlation(x: ArrayLike, y: ArrayLike) -> float | None:
    """Return Spearman's rank correlation of x (n,) and y (n,), from -1 to 1; ties get their mean rank.

    It is None with fewer than three pairs, where it has no meaning, or if all values of x or of y are equal.
    """
    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(a) < MIN_PAIRS or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(scipy.stats.spearmanr(a, b).statistic)


def rank_correlation_interval(pairs: Sequence[tuple[ArrayLike, ArrayLike]], seed: int = 0) -> Interval | None:
    """Return the mean of Spearman's rank correlations of several groups of pairs, with its 95% interval.

    The percentile interval is that of 9,999 resamples. In each resample, the pairs of each group are drawn
    with replacement. Resampled groups whose values are all equal are left out of the mean.

    Args:
        pairs: for each group, such as a training, its values x (n,) and y (n,), e.g. estimates and returns
            of n agents.
        seed: seed of the resamples.

    Returns:
        The mean and its interval; None if the correlation of each group is undefined (`rank_correlation`).

    Raises:
        ValueError: if x and y of a group differ in length.
    """
    groups = [np.stack([np.asarray(x, np.float64), np.asarray(y, np.float64)]) for x, y in pairs]
    groups = [group for group in groups if rank_correlation(*group) is not None]
    if not groups:
        return None
    value = float(np.mean([rank_correlation(*group) for group in groups]))
    rng = np.random.default_rng(seed)

    def resample(count: int) -> NDArray[np.float64]:
        return np.stack([_resampled_correlations(group, count, rng) for group in groups], axis=1)

    each = in_batches(resample, sum(group.size for group in groups))
    defined = np.isfinite(each)
    means = np.nansum(each, axis=1)[defined.any(axis=1)] / defined.sum(axis=1)[defined.any(axis=1)]
    return Interval.of_resamples(value, means)


def _resampled_correlations(
    group: NDArray[np.float64], count: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw pairs of a group (2, n) ``count`` times; return the rank correlations, NaN if undefined."""
    drawn = group[:, rng.integers(group.shape[1], size=(count, group.shape[1]))]
    ranks = scipy.stats.rankdata(drawn, axis=2)
    x, y = ranks - ranks.mean(axis=2, keepdims=True)
    scale = np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    return np.divide((x * y).sum(axis=1), scale, out=np.full(count, np.nan), where=scale > 0)
