"""Learn then Test: settings that keep a promised risk, found by multiple testing on calibration data."""

import numpy as np
import scipy  # its parts are read when they are first used: stats takes a second
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr

from rlxf.attention.checks import check_finite_number

Losses = NDArray[np.float64]


def hoeffding_bentkus(risk: ArrayLike, samples: int, alpha: float) -> NDArray[np.float64]:
    r"""P-value of "the true risk is more than alpha", for losses from 0 to 1 with the mean ``risk``.

    ``min(exp(-n h(min(r, alpha), alpha)), e P(Bin(n, alpha) <= ceil(n r)))`` with
    ``h(a, b) = a log(a / b) + (1 - a) log((1 - a) / (1 - b))`` and ``0 log 0 = 0``.

    Source: Bates et al. 2021, arXiv:2101.02703, section 3; Angelopoulos et al. 2021, arXiv:2110.01052.

    Args:
        risk: r, mean loss of each setting, (K,).
        samples: n, over how many losses.
        alpha: the promised risk, between 0 and 1.
    """
    r = np.asarray(risk, np.float64)
    a = np.minimum(r, alpha)
    hoeffding = np.exp(-samples * (rel_entr(a, alpha) + rel_entr(1 - a, 1 - alpha)))
    # Rounding must not lift n r, a whole number where losses are 0 or 1, to the next one.
    bentkus = np.e * scipy.stats.binom.cdf(np.ceil(np.round(samples * r, 9)), samples, alpha)
    return np.minimum(hoeffding, bentkus)


def keeps_risk(losses: Losses, alpha: float, delta: float) -> NDArray[np.bool_]:
    """Which settings keep the risk ``E[loss] <= alpha``, all of them together with probability 1 - delta.

    Settings are tested in order, the safest first, each at level delta, up to the first that fails: its
    p-value is more than delta. As each test comes only after all before it were passed, none has to share its
    level with others.

    Source: Angelopoulos et al. 2021, arXiv:2110.01052, section 2, "fixed sequence testing".

    Args:
        losses: from 0 to 1, of n calibration samples and K settings, (n, K). Samples are independent.
        alpha: the promised risk, between 0 and 1.
        delta: probability with which the promise may be broken, between 0 and 1.

    Returns:
        (K,): True for the settings before the first that fails.

    Raises:
        ValueError: if alpha or delta is not between 0 and 1, there are no losses, or one is not from 0 to 1.
    """
    _check(losses, alpha, delta)
    p = hoeffding_bentkus(losses.mean(axis=0), len(losses), alpha)
    return np.logical_and.accumulate(p <= delta)


def check_levels(alpha: float, delta: float) -> None:
    """Raise ValueError unless both lie between 0 and 1, TypeError if one is no number."""
    for name, value in (("alpha", alpha), ("delta", delta)):
        check_finite_number(name, value)
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")


def _check(losses: Losses, alpha: float, delta: float) -> None:
    check_levels(alpha, delta)
    if losses.ndim != 2 or not losses.size:
        raise ValueError(f"losses must be of samples and settings, (n, K), got shape {losses.shape}")
    if not ((losses >= 0) & (losses <= 1)).all():
        raise ValueError(f"losses must be from 0 to 1, got {losses.min()} to {losses.max()}")
