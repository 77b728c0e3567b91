"""Statistics of a few noisy returns: pure functions of arrays."""

import numpy as np
import scipy  # its parts are read when they are first used: stats takes a second

CONFIDENCE = 0.95
RESAMPLES = 9999
_BATCH_NUMBERS = 2**20  # numbers resampled at a time: 8 MiB whatever the number of returns


def interquartile_mean(x: np.ndarray) -> float:
    """Mean of x (n,) without its floor(n / 4) smallest and floor(n / 4) largest values.

    It ignores a few lucky or broken episodes and needs fewer of them than the median does.

    Source: Agarwal et al. 2021, arXiv:2108.13264, section 4.3.
    """
    return float(scipy.stats.trim_mean(x, 0.25))


def bootstrap_interval(x: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the mean of x (n,): (low, high), with low <= mean <= high.

    The means of 9,999 samples of n values, drawn from x with replacement, are sorted; 2.5% of them lie
    on either side of the interval. Equal values give an interval of width 0, and so does a single one,
    which says nothing about the spread.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife".

    Args:
        x: values, at least one.
        seed: of the samples; the same one gives the same interval.
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
    # Rounding alone may put the mean of nearly equal values outside.
    return min(float(low), mean), max(float(high), mean)
