"""Calibration of early exits: Learn then Test (risk control), and the calibrated threshold."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import scipy  # scipy loads submodules on first use; importing scipy.stats takes a second
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from rlxf.attention import Transformer
from rlxf.attention.depth.base import CalibratableExit, Depth
from rlxf.utils.checks import check_between, check_finite_number
from rlxf.utils.tables import Table, Tabular
from rlxf.utils.warnings import warn_user

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
    rel_entr = scipy.special.rel_entr
    hoeffding = np.exp(-samples * (rel_entr(a, alpha) + rel_entr(1 - a, 1 - alpha)))
    # If losses are 0 or 1, n r is an integer; rounding errors must not raise its ceiling by 1.
    bentkus = np.e * scipy.stats.binom.cdf(np.ceil(np.round(samples * r, 9)), samples, alpha)
    return np.minimum(hoeffding, bentkus)


def select_risk_controlled(losses: Losses, alpha: float, delta: float) -> NDArray[np.bool_]:
    """Select settings that all keep the risk ``E[loss] <= alpha`` with probability at least 1 - delta.

    Settings are tested in order, the safest first, each at level delta. Testing stops at the first setting
    whose p-value exceeds delta. Because each test requires that all previous ones passed, no correction for
    multiple tests is needed.

    Source: Angelopoulos et al. 2021, arXiv:2110.01052, section 2, "fixed sequence testing".

    Args:
        losses: losses in [0, 1] of n independent calibration samples and K settings, (n, K).
        alpha: bound on the risk, between 0 and 1.
        delta: maximum probability that the guarantee fails, between 0 and 1.

    Returns:
        (K,) bool: True for the settings before the first that fails.

    Raises:
        ValueError: if alpha or delta is not between 0 and 1, losses are empty, or a loss is outside [0, 1].
    """
    check_levels(alpha, delta)
    if losses.ndim != 2 or not losses.size:
        raise ValueError(f"losses must have the shape (samples, settings) and entries, got {losses.shape}")
    if not ((losses >= 0) & (losses <= 1)).all():
        raise ValueError(f"losses must be in [0, 1], got {losses.min()} to {losses.max()}")
    p = hoeffding_bentkus(losses.mean(axis=0), len(losses), alpha)
    return np.logical_and.accumulate(p <= delta)


def check_levels(alpha: float, delta: float) -> None:
    """Raise ValueError unless both lie between 0 and 1; TypeError if one is not a number."""
    for name, value in (("alpha", alpha), ("delta", delta)):
        check_between(name, value, 0, 1, inclusive="neither")


THRESHOLDS = (1.0, 0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.96, *np.linspace(0.95, 0.0, 20).round(2).tolist())
"""Confidence thresholds, the safest first; dense near 1, where cosines between hidden states lie."""


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(Tabular):
    """Results of the calibration of K exit thresholds.

    ``print(calibration)`` shows one line; ``print(calibration.table())`` and notebooks show the table.

    Args:
        thresholds: K thresholds in decreasing order, the safest first.
        risk: fraction of an episode's steps whose action differs from the full-depth action, averaged over
            episodes, for each threshold, (K,).
        depth: mean number of passes through the layers for each threshold, (K,).
        within_bound: whether each threshold satisfies the risk bound, (K,) bool.
    """

    thresholds: tuple[float, ...]
    risk: NDArray[np.float64]
    depth: NDArray[np.float64]
    within_bound: NDArray[np.bool_]

    @property
    def threshold(self) -> float:
        """Lowest threshold that satisfies the risk bound; infinity disables early exits if there is none."""
        kept = np.flatnonzero(self.within_bound)
        return self.thresholds[kept[-1]] if len(kept) else math.inf

    def __str__(self) -> str:
        """Return the chosen threshold with its risk and depth, in one line."""
        kept = np.flatnonzero(self.within_bound)
        passed = f"{len(kept)} of {len(self.thresholds)} thresholds satisfy the risk bound"
        if not len(kept):
            return f"{passed}: no early exit"
        risk, depth = self.risk[kept[-1]], self.depth[kept[-1]]
        return f"threshold {self.threshold:g}: {risk:.1%} other actions, {depth:.2f} passes; {passed}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def table(self) -> Table:
        """Return a row for each threshold, as a table that ``print`` shows."""
        table = Table("threshold", "other actions", "passes", "guaranteed", title="Calibration")
        for row in zip(self.thresholds, self.risk, self.depth, self.within_bound, strict=True):
            threshold, risk, depth, kept = row
            table.add_row(f"{threshold:g}", f"{risk:.1%}", f"{depth:.2f}", "yes" if kept else "no")
        return table


def calibratable_exit(transformer: Transformer) -> CalibratableExit:
    """Return the exit rule of a transformer whose threshold can be calibrated.

    Raises:
        ValueError: if it has none, i.e. the depth is not `CALM`.
    """
    rule = transformer.depth.calibratable_exit()
    if rule is None:
        raise ValueError(
            f"only a core with depth=CALM(...) has a threshold to calibrate, this one has "
            f"depth={transformer.spec.depth}"
        )
    return rule


class CalibrationMixin:
    """Mixin of agents: calibration of early exits, and the mean depth of predictions."""

    policy: Any

    def mean_predict_depth(self) -> float | None:
        """Return the mean number of layers per token in `predict` since the last call or start of `evaluate`.

        None if the depth is fixed or there was no prediction. See `ACT`, `CALM` and `DepthAdaptive`.
        """
        depth = self.policy.transformer.pop_mean_acting_depth()
        return None if depth is None else depth.item()

    def _calibrate(
        self,
        measure: Callable[[tuple[float, ...]], tuple[Losses, NDArray[np.float64]]],
        thresholds: Sequence[float],
        alpha: float,
        delta: float,
    ) -> Calibration:
        """Check the arguments, measure the risk of each threshold, and set the chosen threshold.

        Args:
            measure: function of K thresholds that returns the losses (n, K) of n episodes and the mean depth
                of each threshold, (K,).
            thresholds: candidate thresholds, the safest first.
            alpha: bound on the risk.
            delta: maximum probability that the guarantee fails.

        Raises:
            ValueError: before any computation, if the depth is not `CALM`, or an argument is out of range.
            TypeError: if an argument is not a number.
        """
        rule = calibratable_exit(self.policy.transformer)
        candidates = tuple(thresholds)
        check_thresholds(candidates)
        check_levels(alpha, delta)
        losses, depth = measure(candidates)
        kept = select_risk_controlled(losses, alpha, delta)
        calibration = Calibration(candidates, losses.mean(axis=0), depth, kept)
        rule.threshold.fill_(calibration.threshold)
        return calibration


def check_exit_confidence(depth: Depth, action_space: spaces.Space[Any]) -> None:
    """Raise ValueError if the exit confidence needs discrete actions and the action space is a Box."""
    depth.check_targets(action_space, discrete=not isinstance(action_space, spaces.Box))


def check_thresholds(thresholds: tuple[float, ...]) -> None:
    """Raise ValueError unless thresholds are strictly decreasing and in [0, 1].

    Raises:
        TypeError: if a threshold is not a number.
    """
    for each in thresholds:
        check_finite_number("a threshold", each.item() if isinstance(each, np.floating) else each)
    falling = all(later < earlier for earlier, later in pairwise(thresholds))
    if not thresholds or not falling or thresholds[0] > 1 or thresholds[-1] < 0:
        raise ValueError(f"thresholds must be strictly decreasing numbers from 1 to 0, got {thresholds}")


def reset_calibration(transformer: Transformer) -> None:
    """Reset a calibrated exit threshold to that of the spec, because the weights are about to change.

    Warns:
        UserWarning: if the threshold was calibrated.
    """
    rule = transformer.depth.calibratable_exit()
    if rule is None or rule.threshold == rule.threshold.new_tensor(rule.spec_threshold):
        return
    warn_user(
        f"the exit threshold {rule.threshold.item():g} was calibrated for weights that now change, so it "
        f"guarantees nothing: it is reset to {rule.spec_threshold:g}, the core's; calibrate again after "
        f"training"
    )
    rule.threshold.fill_(rule.spec_threshold)
