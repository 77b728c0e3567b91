"""Conversion of NumPy scalars to built-in numbers, which JSON can hold."""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from typing import Any

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
