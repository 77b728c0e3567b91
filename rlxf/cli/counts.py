"""Numbers that several commands take: how counts are written, and what is allowed."""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from math import inf
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

DIGITS = 18
"""Largest power of ten of a count: 10**18 is more than the steps of any training."""


class NotACountError(Exception):
    """An argument that is no whole number. (tyro frames a ValueError with a page of help.)

    Args:
        text: the argument.
    """

    def __init__(self, text: str):
        super().__init__(f"must be a whole number such as 100000, 100_000 or 1e5, got {text}")
        self.text = text

    def message(self, args: Sequence[str]) -> str:
        """The message, with the option among ``args`` that the text belongs to."""
        options = [args[place - 1] for place, word in enumerate(args) if place and word == self.text]
        options += [word.partition("=")[0] for word in args if word.endswith(f"={self.text}")]
        return f"{options[0] if options else 'a count'} {self}"


def whole_number(text: str) -> int:
    """Parse the whole number that a text such as ``100000``, ``100_000``, ``1e5`` or ``1.5e3`` stands for.

    Raises:
        NotACountError: if it is no number, has a fraction, or is 10**19 or more.
    """
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise NotACountError(text) from None
    if not number.is_finite() or number.adjusted() > DIGITS or number != number.to_integral_value():
        raise NotACountError(text)
    return int(number)


def _read(words: list[str]) -> int:
    if words == ["None"]:  # an optional count: tyro accepts None
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
"""Type of an option that counts something: `whole_number` reads it."""


def check_counts(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is None or at least 1."""
    for name in names:
        count = getattr(options, name)
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def check_from_zero(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is None, or finite and at least 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value < inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
