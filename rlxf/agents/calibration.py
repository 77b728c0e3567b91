"""Choose an exit threshold so that early-exit actions match full-depth actions up to a guaranteed risk."""

import math
import warnings
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlxf.agents.learn_then_test import keeps_risk
from rlxf.attention import CALM, Transformer
from rlxf.attention.checks import check_finite_number
from rlxf.attention.depth.calm import Confident
from rlxf.utils.tables import Table, Tabular

THRESHOLDS = (1.0, 0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.96, *np.linspace(0.95, 0.0, 20).round(2).tolist())
"""Confidence thresholds, the safest first; dense near 1, where cosines between hidden states lie."""


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(Tabular):
    """Results of the calibration of K exit thresholds.

    ``print(calibration)`` shows one line; ``print(calibration.table())`` and notebooks show the table.

    Args:
        thresholds: K thresholds in falling order, the safest first.
        risk: share of an episode's steps whose action differs from the full-depth action, averaged over
            episodes, for each threshold, (K,).
        depth: mean number of passes through the layers for each threshold, (K,).
        kept: whether the risk of each threshold is guaranteed, (K,) bool.
    """

    thresholds: tuple[float, ...]
    risk: NDArray[np.float64]
    depth: NDArray[np.float64]
    kept: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        thresholds: tuple[float, ...],
        losses: NDArray[np.float64],
        depth: NDArray[np.float64],
        alpha: float,
        delta: float,
    ) -> "Calibration":
        """Compute the result from losses (n, K) of n independent samples; see `keeps_risk`."""
        return cls(thresholds, losses.mean(axis=0), depth, keeps_risk(losses, alpha, delta))

    @property
    def threshold(self) -> float:
        """Lowest threshold with a guaranteed risk; infinity, which disables early exits, if there is none."""
        kept = np.flatnonzero(self.kept)
        return self.thresholds[kept[-1]] if len(kept) else math.inf

    def __str__(self) -> str:
        """Return the chosen threshold with its risk and depth, in one line."""
        kept = np.flatnonzero(self.kept)
        passed = f"{len(kept)} of {len(self.thresholds)} thresholds keep the guaranteed risk"
        if not len(kept):
            return f"{passed}: no early exit"
        risk, depth = self.risk[kept[-1]], self.depth[kept[-1]]
        return f"threshold {self.threshold:g}: {risk:.1%} other actions, {depth:.2f} passes; {passed}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def table(self) -> Table:
        """Return a row for each threshold, as a table that ``print`` shows."""
        table = Table("threshold", "other actions", "passes", "guaranteed", title="Calibration")
        for row in zip(self.thresholds, self.risk, self.depth, self.kept, strict=True):
            threshold, risk, depth, kept = row
            table.add_row(f"{threshold:g}", f"{risk:.1%}", f"{depth:.2f}", "yes" if kept else "no")
        return table


def confidence_of(transformer: Transformer) -> Confident:
    """Return the `CALM` depth controller of a transformer.

    Raises:
        ValueError: if the depth of the transformer is not `CALM`.
    """
    if not isinstance(transformer.depth, Confident):
        raise ValueError(
            f"only a core with depth=CALM(...) has a threshold to calibrate, this one has "
            f"depth={transformer.spec.depth}"
        )
    return transformer.depth


def check_thresholds(thresholds: tuple[float, ...]) -> None:
    """Raise ValueError unless thresholds fall strictly within [0, 1]; TypeError if one is not a number."""
    for each in thresholds:
        check_finite_number("a threshold", each.item() if isinstance(each, np.floating) else each)
    falling = all(later < earlier for earlier, later in pairwise(thresholds))
    if not thresholds or not falling or thresholds[0] > 1 or thresholds[-1] < 0:
        raise ValueError(f"thresholds must be strictly decreasing numbers from 1 to 0, got {thresholds}")


def forget_calibration(transformer: Transformer) -> None:
    """Reset a calibrated exit threshold to that of the spec, because the weights are about to change.

    Warns:
        UserWarning: if the threshold was calibrated.
    """
    if not isinstance(transformer.depth, Confident):
        return
    assert isinstance(transformer.spec.depth, CALM)
    calibrated, given = transformer.depth.threshold, transformer.spec.depth.threshold
    if calibrated == calibrated.new_tensor(given):
        return
    warnings.warn(
        f"the exit threshold {calibrated.item():g} was calibrated for weights that now change, so it "
        f"guarantees nothing: it is reset to {given:g}, the core's; calibrate again after training",
        stacklevel=3,
    )
    calibrated.fill_(given)
