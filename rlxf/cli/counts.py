"""Checks of numbers that several commands share."""

from math import inf
from typing import Any


def check_counts(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is None or at least 1."""
    for name in names:
        count = getattr(options, name)
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def check_from_zero(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is finite and at least 0."""
    for name in names:
        value = getattr(options, name)
        if not 0 <= value < inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
