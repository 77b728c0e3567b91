"""Parsing and validation of numeric options that several commands share."""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from math import inf
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

DIGITS = 18
"""Largest exponent of ten of a count; 10**18 exceeds the steps of any training."""


class NotACountError(Exception):
    """Error for an argument that is not a whole number.

    It is not a ValueError, because tyro prints the whole help text next to a ValueError.

    Args:
        text: the argument.
    """

    def __init__(self, text: str):
        super().__init__(f"must be a whole number such as 100000, 100_000 or 1e5, got {text}")
        self.text = text

    def message(self, args: Sequence[str]) -> str:
        """Return the message, prefixed with the option in ``args`` that has this value."""
        options = [args[place - 1] for place, word in enumerate(args) if place and word == self.text]
        options += [word.partition("=")[0] for word in args if word.endswith(f"={self.text}")]
        return f"{options[0] if options else 'a count'} {self}"


def whole_number(text: str) -> int:
    """Parse a whole number such as ``100000``, ``100_000``, ``1e5`` or ``1.5e3``.

    Raises:
        NotACountError: if the text is not a number, has a fractional part, or is 10**19 or more.
    """
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise NotACountError(text) from None
    if not number.is_finite() or number.adjusted() > DIGITS or number != number.to_integral_value():
        raise NotACountError(text)
    return int(number)


def _read(words: list[str]) -> int:
    if words == ["None"]:  # tyro then tries the None of an optional count
        raise ValueError(words[0])
    return whole_number(words[0])


Count = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=_read,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda number: [str(number)],
    ),
]
"""Type of an option that is a count; it is parsed by `whole_number`."""


def check_counts(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is None or at least 1."""
    for name in names:
        count = getattr(options, name)
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def check_from_zero(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is None, or is finite and at least 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value < inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
