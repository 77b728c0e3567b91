"""Learn then Test: p-values of the authors, and the guarantee in a simulation."""

import numpy as np
import pytest

from rlxf.agents.calibration import hoeffding_bentkus, select_risk_controlled
from tests.attention.oracle import load

VECTOR = {name: value.numpy() for name, value in load("calm_ltt").items()}
ALPHA, DELTA = float(VECTOR["cfg_alpha"]), float(VECTOR["cfg_delta"])


def test_p_values_equal_reference():
    losses = VECTOR["in_losses"]
    risk = losses.mean(axis=0)
    np.testing.assert_allclose(risk, VECTOR["out_risk"], rtol=1e-12)
    p = hoeffding_bentkus(risk, len(losses), ALPHA)
    np.testing.assert_allclose(p, VECTOR["out_p_hb_formula"], rtol=1e-9, atol=1e-300)


def test_p_value_at_zero_risk():
    p = hoeffding_bentkus([0.0, 0.2, 0.4], 5, 0.3)
    np.testing.assert_allclose(p.clip(max=1), VECTOR["out_hb_formula_n5"], rtol=1e-9)


def test_settings_before_first_failure_are_selected():
    kept = VECTOR["in_lambdas"][select_risk_controlled(VECTOR["in_losses"], ALPHA, DELTA)]
    np.testing.assert_array_equal(kept, VECTOR["out_valid"])


def test_settings_after_a_failure_are_not_tested():
    losses = np.zeros((200, 3))
    losses[:, 1] = 1.0
    assert select_risk_controlled(losses, 0.1, 0.1).tolist() == [True, False, False]


@pytest.mark.parametrize("samples", [50, 200])
def test_guarantee_fails_at_most_with_probability_delta(samples):
    """True risks rise from 0 to 0.4; the last selected setting may exceed 0.2 only rarely."""
    true = np.linspace(0.0, 0.4, 21)
    rng, broken, daring = np.random.default_rng(0), 0, []
    for _ in range(200):
        losses = (rng.random((samples, 1)) < true).astype(np.float64)
        kept = select_risk_controlled(losses, 0.2, 0.1)
        chosen = true[kept].max() if kept.any() else 0.0
        broken += chosen > 0.2
        daring.append(chosen)
    assert broken <= 0.1 * 200
    assert np.mean(daring) > 0.05


@pytest.mark.parametrize(
    ("losses", "alpha", "delta", "message"),
    [
        (np.zeros((3, 2)), 0.0, 0.1, "alpha"),
        (np.zeros((3, 2)), 0.1, 1.0, "delta"),
        (np.zeros((0, 2)), 0.1, 0.1, "samples"),
        (np.zeros(3), 0.1, 0.1, "samples"),
        (np.full((3, 2), 1.5), 0.1, 0.1, r"in \[0, 1\]"),
        (np.full((3, 2), np.nan), 0.1, 0.1, r"in \[0, 1\]"),
    ],
)
def test_bad_input(losses, alpha, delta, message):
    with pytest.raises(ValueError, match=message):
        select_risk_controlled(losses, alpha, delta)
