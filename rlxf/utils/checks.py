"""Checks of arguments and options, and their conversion to built-in numbers."""

import math
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from typing import Any, Literal

MAX_INT = 2**31 - 1
"""Largest accepted size, distance or count: the product of two of them fits into an int64."""

MAX_INT64 = 2**63 - 1
"""Largest int64."""

MAX_SEED = MAX_INT64
"""Largest accepted seed."""

MIN_FLOAT, MAX_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Smallest and largest magnitude of a normal float32."""

RANGES = {
    "both": "from {} to {}",
    "left": "from {} to below {}",
    "right": "above {} and at most {}",
    "neither": "above {} and below {}",
}
"""Description of a range by the ends that belong to it."""

POST_INIT = "__post_init__"
"""Name of the method in which dataclasses check their fields."""


def to_python_number(value: Any) -> Any:
    """Return an integer as an int and another real number as a float, also in a tuple or list.

    Other values are returned as they are, among them bools and NumPy's bools, which are no numbers here.
    """
    if type(value) in (tuple, list):
        return type(value)(map(to_python_number, value))
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


class PythonNumbers:
    """Base of dataclasses whose fields have built-in numbers, so that they can be stored as JSON.

    NumPy scalars are converted before ``__post_init__`` of the dataclass.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check = cls.__dict__.get(POST_INIT)
        if check is not None:
            setattr(cls, POST_INIT, _after_conversion(check))

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            if field.init:
                object.__setattr__(self, field.name, to_python_number(getattr(self, field.name)))


def _after_conversion(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``__post_init__`` of a dataclass, preceded by the conversion."""

    @wraps(check)
    def convert_and_check(self: Any) -> None:
        PythonNumbers.__post_init__(self)
        check(self)

    return convert_and_check


def is_number(value: Any, kind: type = Real) -> bool:
    """Return whether a value is a number of an abstract class of `numbers`, and no bool."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_int(name: str, value: Any, least: int = 1, most: int = MAX_INT) -> None:
    """Check that ``value`` is an int, or a NumPy integer, from ``least`` to ``most``.

    Raises:
        TypeError: if it is not an integer, or a bool.
        ValueError: if it is out of range.
    """
    value = to_python_number(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")


def as_whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return an integer, or another number with an integral value such as 1e5, as an int.

    Raises:
        TypeError: if the value is not a number.
        ValueError: if it has a fraction, is not finite, or is less than ``least`` or more than `MAX_INT64`.
    """
    number = to_python_number(value)
    if isinstance(number, float):
        if not number.is_integer():
            raise ValueError(f"{name} must be a whole number, got {number}")
        number = int(number)
    check_int(name, number, least, MAX_INT64)
    return int(number)


def check_seed(name: str, value: Any) -> None:
    """Check that ``value`` is an int from 0 to `MAX_SEED`. Raises like `check_int`."""
    check_int(name, value, least=0, most=MAX_SEED)


def check_finite_number(name: str, value: Any) -> None:
    """Check that ``value`` is a finite number that float32 represents without overflow or underflow.

    NumPy scalars are accepted.

    Raises:
        TypeError: if it is not a real number, or a bool.
        ValueError: if it is NaN, infinite, an integer beyond int64, which torch does not accept, or outside
            the range of normal float32 numbers and not 0.
    """
    value = to_python_number(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if isinstance(value, int) and MAX_INT64 < abs(value) <= MAX_FLOAT:
        raise ValueError(f"{name} must be at most 2**63 - 1 as an integer, got {value}: write {float(value)}")
    if value and not MIN_FLOAT <= abs(value) <= MAX_FLOAT:
        raise ValueError(f"{name} must be 0 or from 1.2e-38 to 3.4e+38 in size, got {value}")


def check_not_negative(name: str, value: Any) -> None:
    """Check that ``value`` is a finite number and at least 0. Raises like `check_finite_number`."""
    check_finite_number(name, value)
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def check_positive(name: str, value: Any) -> None:
    """Check that ``value`` is a finite number above 0. Raises like `check_finite_number`."""
    check_finite_number(name, value)
    if value <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")


def check_between(
    name: str,
    value: Any,
    low: float,
    high: float,
    inclusive: Literal["both", "left", "right", "neither"] = "both",
) -> None:
    """Check that ``value`` is a finite number between two numbers. Raises like `check_finite_number`.

    Args:
        name: name of the value, for messages.
        value: the value.
        low: lower end of the range.
        high: upper end of the range.
        inclusive: ends that belong to the range, as in pandas.
    """
    check_finite_number(name, value)
    too_low = value < low or (value == low and inclusive in ("right", "neither"))
    too_high = value > high or (value == high and inclusive in ("left", "neither"))
    if too_low or too_high:
        raise ValueError(f"{name} must be {RANGES[inclusive].format(low, high)}, got {value}")


def check_choice(name: str, value: Any, words: tuple[str | None, ...]) -> None:
    """Raise ValueError unless ``value`` is one of the given words."""
    if value not in words:
        raise ValueError(f"{name} must be one of {words}, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a bool. The truth value of other types is not accepted."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def is_tuple_or_list(value: Any) -> bool:
    """Return whether an option is a tuple, or a list: JSON has no tuples."""
    return isinstance(value, tuple | list)
