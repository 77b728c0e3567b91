"""Simulated frequency with which Learn then Test violates its risk guarantee."""

import numpy as np
from rich.table import Table

from rlxf.agents.common.calibration import select_risk_controlled

RISKS = np.array([0.0, 0.05, 0.1, 0.15, 0.2001, 0.25, 0.3, 0.4])
"""True risks of the settings, in increasing order. One is just above alpha, which is hardest to detect."""
ALPHA, DELTAS, SAMPLES = 0.2, (0.05, 0.1, 0.2), (50, 200, 1000)


def violations_table(simulations: int) -> Table:
    """Return a table with a row for each delta and number of samples."""
    table = Table(
        "delta",
        "samples",
        "guarantee violated",
        "mean true risk of the choice",
        title=f"{simulations} simulated calibrations each, risk bound {ALPHA}",
    )
    for delta in DELTAS:
        for samples in SAMPLES:
            chosen = chosen_risks(simulations, samples, delta)
            violated = f"{(chosen > ALPHA).mean():.1%}"
            table.add_row(f"{delta:.0%}", str(samples), violated, f"{chosen.mean():.3f}")
    return table


def chosen_risks(simulations: int, samples: int, delta: float, seed: int = 0) -> np.ndarray:
    """Return the true risk of the riskiest setting that each calibration accepts, (simulations,); 0: none.

    Losses are 0 or 1. A sample with loss 1 at one setting has loss 1 at all riskier settings, as with the
    thresholds of `CALM`.
    """
    rng, chosen = np.random.default_rng(seed), np.zeros(simulations)
    for number in range(simulations):
        losses = (rng.random((samples, 1)) < RISKS).astype(np.float64)
        accepted = select_risk_controlled(losses, ALPHA, delta)
        chosen[number] = RISKS[accepted].max(initial=0.0)
    return chosen
