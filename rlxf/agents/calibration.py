"""How early an agent may leave so that what it does is, but for a promised risk, what it would have done."""

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
"""Of confidence, from the safest down; close to one another near 1, where cosines of states lie."""


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(Tabular):
    """What came of thresholds, the safest first.

    ``print(calibration)`` shows one line, ``print(calibration.table())`` and notebooks the table.

    Args:
        thresholds: K of them, falling.
        risk: share of an episode's steps with another action than with all passes, on average over episodes,
            for each, (K,).
        depth: passes that were taken on average, for each, (K,).
        kept: which of them keep the promise, (K,) bool.
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
        """From losses (n, K) of n independent samples; see `keeps_risk`."""
        return cls(thresholds, losses.mean(axis=0), depth, keeps_risk(losses, alpha, delta))

    @property
    def threshold(self) -> float:
        """The lowest that keeps the promise; infinite, so that nothing leaves early, if none does."""
        kept = np.flatnonzero(self.kept)
        return self.thresholds[kept[-1]] if len(kept) else math.inf

    def __str__(self) -> str:
        """Return the chosen threshold with its risk and depth, in one line."""
        kept = np.flatnonzero(self.kept)
        passed = f"{len(kept)} of {len(self.thresholds)} thresholds keep the promise"
        if not len(kept):
            return f"{passed}: no early exit"
        risk, depth = self.risk[kept[-1]], self.depth[kept[-1]]
        return f"threshold {self.threshold:g}: {risk:.1%} other actions, {depth:.2f} passes; {passed}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def table(self) -> Table:
        """Return a row for each threshold, as a table that ``print`` shows."""
        table = Table("threshold", "other actions", "passes", "keeps the promise", title="Calibration")
        for row in zip(self.thresholds, self.risk, self.depth, self.kept, strict=True):
            threshold, risk, depth, kept = row
            table.add_row(f"{threshold:g}", f"{risk:.1%}", f"{depth:.2f}", "yes" if kept else "no")
        return table


def confidence_of(transformer: Transformer) -> Confident:
    """What says how confident a transformer is.

    Raises:
        ValueError: if its depth is no `CALM`.
    """
    if not isinstance(transformer.depth, Confident):
        raise ValueError(
            f"only the depth CALM has a threshold to calibrate, the core has {transformer.spec.depth}"
        )
    return transformer.depth


def check_thresholds(thresholds: tuple[float, ...]) -> None:
    """Raise ValueError unless they fall from the safest on, from 1 to 0; TypeError if one is no number."""
    for each in thresholds:
        check_finite_number("a threshold", each.item() if isinstance(each, np.floating) else each)
    falling = all(later < earlier for earlier, later in pairwise(thresholds))
    if not thresholds or not falling or thresholds[0] > 1 or thresholds[-1] < 0:
        raise ValueError(f"thresholds must fall, the safest first, within 1 and 0, got {thresholds}")


def forget_calibration(transformer: Transformer) -> None:
    """Leave as early as the spec says, where a threshold was calibrated with weights that now change.

    Warns:
        UserWarning: if there was one.
    """
    if not isinstance(transformer.depth, Confident):
        return
    assert isinstance(transformer.spec.depth, CALM)
    calibrated, given = transformer.depth.threshold, transformer.spec.depth.threshold
    if calibrated == calibrated.new_tensor(given):
        return
    warnings.warn(
        f"the threshold {calibrated.item():g} was calibrated with other weights and promises nothing now: it "
        f"is {given:g} again, as in the core; calibrate anew once the agent has learned",
        stacklevel=3,
    )
    calibrated.fill_(given)
