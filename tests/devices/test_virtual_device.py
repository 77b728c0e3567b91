"""Tests that the virtual device reports what an accelerator forbids or waits for."""

import pytest

from tests.devices.accelerator import IS_SIMULATED
from tests.devices.faults import early_read, mixed_devices, waits_of_operations

pytestmark = pytest.mark.skipif(not IS_SIMULATED, reason="tests of the simulated device")


def test_mixed_devices_are_an_error_where_they_are_one_with_cuda(on_device):
    assert on_device(mixed_devices) == ["sum", "product", "index on the device", "stack of scalars"]


def test_reads_and_blocking_copies_wait(on_device):
    waiting = ("number", "decision", "list", "mask", "creation from values", "blocking copy")
    free = ("copy", "fill", "creation")
    assert on_device(waits_of_operations) == dict.fromkeys(waiting, 1) | dict.fromkeys(free, 0)


def test_a_copy_without_a_wait_must_not_be_read_at_once(on_device):
    assert on_device(early_read) == (0.0, 7.0)
