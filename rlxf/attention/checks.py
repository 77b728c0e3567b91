"""Checks that every technique's options share."""

import math
from typing import Any


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``.

    Raises:
        TypeError: if it is no int.
        ValueError: if it is less.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_finite_number(name: str, value: Any) -> None:
    """Raise unless ``value`` is a finite number.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is nan or infinite.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def check_word(name: str, value: Any, words: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of the words."""
    if value not in words:
        raise ValueError(f"{name} must be one of {words}, got {value!r}")
