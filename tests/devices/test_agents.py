"""Tests that agents learn, act and are saved on an accelerator, and how often they wait for it."""

import pytest

from tests.devices.agents import (
    GTRXL,
    OFFLINE,
    check_gtrxl,
    check_offline,
    fault_in_rollout,
    fault_in_update,
    gtrxl_waits,
    offline_waits,
)


@pytest.mark.parametrize("case", GTRXL)
def test_gtrxl(case, on_device):
    on_device(check_gtrxl, case)


@pytest.mark.parametrize("case", OFFLINE)
def test_offline(case, on_device):
    on_device(check_offline, case)


@pytest.mark.parametrize("case", ["default core", "GatedDeltaNet"])
def test_a_rollout_waits_for_the_actions_only_and_a_minibatch_for_its_check(case, on_device):
    steps, minibatches = on_device(gtrxl_waits, case)
    assert set(steps) == {1}
    assert set(minibatches) == {1}


@pytest.mark.parametrize("case", ["target return", "MaxReturn", "QRegularized", "BehaviorCloning"])
def test_an_offline_update_waits_for_its_check_only(case, on_device):
    assert set(on_device(offline_waits, case)) == {1}


def test_outputs_that_are_not_finite_reach_no_environment(on_device):
    assert "the memory before the step contains NaN" in on_device(fault_in_rollout)


def test_an_update_names_the_cause_of_outputs_that_are_not_finite(on_device):
    assert "contains nan" in on_device(fault_in_update)
