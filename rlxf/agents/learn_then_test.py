"""Learn then Test: select settings with a guaranteed risk by multiple testing on calibration data."""

import numpy as np
import scipy  # scipy loads submodules on first use; importing scipy.stats takes a second
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr

from rlxf.attention.checks import check_finite_number

Losses = NDArray[np.float64]


def hoeffding_bentkus(risk: ArrayLike, samples: int, alpha: float) -> NDArray[np.float64]:
    r"""P-value of the hypothesis "the true risk exceeds alpha", for losses in [0, 1] with mean ``risk``.

    ``min(exp(-n h(min(r, alpha), alpha)), e P(Bin(n, alpha) <= ceil(n r)))`` with
    ``h(a, b) = a log(a / b) + (1 - a) log((1 - a) / (1 - b))`` and ``0 log 0 = 0``.

    Source: Bates et al. 2021, arXiv:2101.02703, section 3; Angelopoulos et al. 2021, arXiv:2110.01052.

    Args:
        risk: r, mean loss of each setting, (K,).
        samples: n, number of losses of each mean.
        alpha: bound on the risk, between 0 and 1.
    """
    r = np.asarray(risk, np.float64)
    a = np.minimum(r, alpha)
    hoeffding = np.exp(-samples * (rel_entr(a, alpha) + rel_entr(1 - a, 1 - alpha)))
    # If losses are 0 or 1, n r is an integer; rounding errors must not raise its ceiling by 1.
    bentkus = np.e * scipy.stats.binom.cdf(np.ceil(np.round(samples * r, 9)), samples, alpha)
    return np.minimum(hoeffding, bentkus)


def keeps_risk(losses: Losses, alpha: float, delta: float) -> NDArray[np.bool_]:
    """Select settings that all keep the risk ``E[loss] <= alpha`` with probability at least 1 - delta.

    Settings are tested in order, the safest first, each at level delta. Testing stops at the first setting
    whose p-value exceeds delta. Because each test requires that all previous ones passed, no correction for
    multiple tests is needed.

    Source: Angelopoulos et al. 2021, arXiv:2110.01052, section 2, "fixed sequence testing".

    Args:
        losses: losses in [0, 1] of n independent calibration samples and K settings, (n, K).
        alpha: bound on the risk, between 0 and 1.
        delta: probability with which the guarantee may fail, between 0 and 1.

    Returns:
        (K,) bool: True for the settings before the first that fails.

    Raises:
        ValueError: if alpha or delta is not between 0 and 1, losses are empty, or a loss is outside [0, 1].
    """
    _check(losses, alpha, delta)
    p = hoeffding_bentkus(losses.mean(axis=0), len(losses), alpha)
    return np.logical_and.accumulate(p <= delta)


def check_levels(alpha: float, delta: float) -> None:
    """Raise ValueError unless both lie between 0 and 1; TypeError if one is not a number."""
    for name, value in (("alpha", alpha), ("delta", delta)):
        check_finite_number(name, value)
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")


def _check(losses: Losses, alpha: float, delta: float) -> None:
    check_levels(alpha, delta)
    if losses.ndim != 2 or not losses.size:
        raise ValueError(f"losses must have the shape (samples, settings) and entries, got {losses.shape}")
    if not ((losses >= 0) & (losses <= 1)).all():
        raise ValueError(f"losses must be in [0, 1], got {losses.min()} to {losses.max()}")
