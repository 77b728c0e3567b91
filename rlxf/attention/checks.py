"""Checks that every technique's options share."""

import math
from typing import Any

MOST = 2**31 - 1
"""No size, distance or number of things may be larger: products of two of them fit into an int64."""

MOST_SEED = 2**63 - 1
"""As large as an int64 can be."""

LEAST_SIZE, MOST_SIZE = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Between these a number that is not 0 is one in float32, too."""


def check_whole(name: str, value: Any, least: int = 1, most: int = MOST) -> None:
    """Raise unless ``value`` is a whole number from ``least`` to ``most``.

    Raises:
        TypeError: if it is no int.
        ValueError: if it is less or more.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def check_seed(name: str, value: Any) -> None:
    """Raise as `check_whole` does unless ``value`` is a whole number from 0 to `MOST_SEED`."""
    check_whole(name, value, least=0, most=MOST_SEED)


def check_finite_number(name: str, value: Any) -> None:
    """Raise unless ``value`` is a finite number, and 0 or no farther from it or nearer than float32 can tell.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is nan or infinite, or float32 would make infinity or nothing of it.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if value and not LEAST_SIZE <= abs(value) <= MOST_SIZE:
        raise ValueError(f"{name} must be 0 or from 1.2e-38 to 3.4e+38 in size, got {value}")


def check_not_negative(name: str, value: Any) -> None:
    """Raise as `check_finite_number` does, and ValueError if ``value`` is less than 0."""
    check_finite_number(name, value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def check_word(name: str, value: Any, words: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of the words."""
    if value not in words:
        raise ValueError(f"{name} must be one of {words}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is True or False: any text or number would count as one of them."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
