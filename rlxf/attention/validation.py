"""Validation of the options of techniques."""

import math
from typing import Any

MAX_INT = 2**31 - 1
"""Largest accepted size, distance or count: the product of two of them fits into an int64."""

MAX_SEED = 2**63 - 1
"""Largest accepted seed: the maximum of int64."""

MIN_FLOAT, MAX_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Smallest and largest magnitude of a normal float32."""


def check_int(name: str, value: Any, least: int = 1, most: int = MAX_INT) -> None:
    """Check that ``value`` is an int from ``least`` to ``most``.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def check_seed(name: str, value: Any) -> None:
    """Check that ``value`` is an int from 0 to `MAX_SEED`. Raises like `check_int`."""
    check_int(name, value, least=0, most=MAX_SEED)


def check_finite_number(name: str, value: Any) -> None:
    """Check that ``value`` is a finite number that float32 represents without overflow or underflow.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is NaN, infinite, or outside the range of normal float32 numbers and not 0.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if value and not MIN_FLOAT <= abs(value) <= MAX_FLOAT:
        raise ValueError(f"{name} must be 0 or from 1.2e-38 to 3.4e+38 in size, got {value}")


def check_not_negative(name: str, value: Any) -> None:
    """Check that ``value`` is a finite number and at least 0. Raises like `check_finite_number`."""
    check_finite_number(name, value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def check_choice(name: str, value: Any, words: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of the given words."""
    if value not in words:
        raise ValueError(f"{name} must be one of {words}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a bool. The truth value of other types is not accepted."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
