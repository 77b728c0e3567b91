"""Tests that captured updates equal those on the CPU, and that other updates are not captured."""

import pytest

from tests.devices.accelerator import IS_SIMULATED
from tests.devices.captured import (
    CAPTURED,
    CAPTURED_OFFLINE,
    NOT_CAPTURED,
    NOT_CAPTURED_OFFLINE,
    TECHNIQUES_CAPTURED,
    TECHNIQUES_NOT_CAPTURED,
    check_captured,
    check_captured_offline,
    check_irregular_batches,
    check_new_parameters,
    check_pretrained_between_updates,
    check_techniques,
    offline_reason,
    reason,
)


@pytest.mark.parametrize("case", CAPTURED)
def test_captured_updates(case, on_device):
    on_device(check_captured, case)


@pytest.mark.skipif(IS_SIMULATED, reason="tensors of the simulated device have no address")
def test_replaced_parameters_are_captured_again(on_device):
    on_device(check_new_parameters)


def test_minibatches_with_empty_slots_are_not_captured(on_device):
    on_device(check_irregular_batches)


@pytest.mark.parametrize("case", NOT_CAPTURED)
def test_other_agents_name_the_reason(case, on_device):
    assert NOT_CAPTURED[case] in on_device(reason, case)


@pytest.mark.parametrize("case", CAPTURED_OFFLINE)
def test_captured_updates_of_offline_agents(case, on_device):
    on_device(check_captured_offline, case)


@pytest.mark.parametrize("case", NOT_CAPTURED_OFFLINE)
def test_other_offline_agents_name_the_reason(case, on_device):
    assert "cannot be captured as a CUDA graph" in on_device(offline_reason, case)


@pytest.mark.first_cases(18)  # test_compiled_gradients.py finds decisions by values in all techniques
@pytest.mark.parametrize("choice", [*TECHNIQUES_CAPTURED, *TECHNIQUES_NOT_CAPTURED])
def test_captured_techniques(choice, on_device):
    on_device(check_techniques, choice)


def test_a_return_scale_that_changes_between_updates(on_device):
    on_device(check_pretrained_between_updates)
