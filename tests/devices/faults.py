"""Programs with faults that the virtual device must report, for a process that has it."""

from collections.abc import Callable
from typing import Any

import torch

from tests.devices.virtual_device import NAME, traffic


def mixed_devices() -> list[str]:
    """Return the operations with tensors of both devices that are an error."""
    here, there = torch.ones(3), torch.ones(3, device=NAME)
    operations = {
        "sum": lambda: there + here,
        "product": lambda: there @ here,
        "index on the device": lambda: here[torch.zeros(1, dtype=torch.long, device=NAME)],
        "stack of scalars": lambda: torch.stack([there[0], here[0]]),
        "scalar": lambda: there * here[0],
        "index on the CPU": lambda: there[torch.zeros(1, dtype=torch.long)],
    }
    return [name for name, operation in operations.items() if _fails(operation)]


def _fails(operation: Callable[[], Any]) -> bool:
    try:
        operation()
    except RuntimeError as error:
        return "tensors are on two devices" in str(error)
    return False


def waits_of_operations() -> dict[str, int]:
    """Return how often the program waits in some operations."""
    x, mask, here = (
        torch.arange(3.0, device=NAME),
        torch.ones(3, dtype=torch.bool, device=NAME),
        torch.ones(3),
    )
    operations = {
        "number": lambda: x[1].item(),
        "decision": lambda: bool(x.isfinite().all()),
        "list": x.tolist,
        "mask": lambda: x[mask],
        "creation from values": lambda: torch.tensor([1.0], device=NAME),
        "blocking copy": lambda: here.to(NAME),
        "copy": lambda: here.to(NAME, non_blocking=True),
        "fill": lambda: x.masked_fill(mask, 0.0),
        "creation": lambda: torch.zeros(3, device=NAME) + torch.arange(3, device=NAME),
    }
    return {name: _waits(operation) for name, operation in operations.items()}


def _waits(operation: Callable[[], Any]) -> int:
    with traffic() as counts:
        operation()
    return counts.waits.total()


def early_read() -> tuple[float, float]:
    """Return a number that is copied without a wait, before and after the next wait."""
    x = torch.full((1,), 7.0, device=NAME)
    arriving = x.to("cpu", non_blocking=True)
    before = float(arriving[0])
    x.tolist()
    return before, float(arriving[0])
