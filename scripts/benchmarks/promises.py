"""How often Learn then Test breaks its promise, where the truth is known."""

import numpy as np
from rich.table import Table

from rlxf.agents.learn_then_test import keeps_risk

RISKS = np.array([0.0, 0.05, 0.1, 0.15, 0.2001, 0.25, 0.3, 0.4])
"""True risks of the settings, the safest first. One lies just above the promise: the hardest to tell."""
ALPHA, DELTAS, SAMPLES = 0.2, (0.05, 0.1, 0.2), (50, 200, 1000)


def promises(simulations: int) -> Table:
    """A line for each promise and number of samples."""
    table = Table(
        "delta",
        "samples",
        "promise broken",
        "mean true risk of what was chosen",
        title=f"{simulations} simulated calibrations each, promised risk {ALPHA}",
    )
    for delta in DELTAS:
        for samples in SAMPLES:
            chosen = chosen_risks(simulations, samples, delta)
            broken = f"{(chosen > ALPHA).mean():.1%}"
            table.add_row(f"{delta:.0%}", str(samples), broken, f"{chosen.mean():.3f}")
    return table


def chosen_risks(simulations: int, samples: int, delta: float, seed: int = 0) -> np.ndarray:
    """True risk of the most daring setting that each calibration keeps, (simulations,); 0 for none.

    Losses are 0 or 1. A sample that is lost at one setting is lost at all that are more daring, as with the
    thresholds of `CALM`.
    """
    rng, chosen = np.random.default_rng(seed), np.zeros(simulations)
    for number in range(simulations):
        losses = (rng.random((samples, 1)) < RISKS).astype(np.float64)
        kept = keeps_risk(losses, ALPHA, delta)
        chosen[number] = RISKS[kept].max(initial=0.0)
    return chosen
