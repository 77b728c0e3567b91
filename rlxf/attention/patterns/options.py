"""Options of patterns that hold one number for each layer or head, and their checks."""

from typing import Any

from rlxf.attention.technique import SpecView, Technique
from rlxf.utils.checks import MAX_INT, check_int

ByLayer = int | tuple[int, ...]
"""Option with one number for all layers, or with a tuple of numbers that repeats over the layers."""


def numbers_by_layer(value: ByLayer) -> tuple[int, ...]:
    """Return the numbers that repeat over the layers."""
    return value if isinstance(value, tuple) else (value,)


def number_in_layer(value: ByLayer, layer: int) -> int:
    """Return the number of layer 0, 1, ..."""
    numbers = numbers_by_layer(value)
    return numbers[layer % len(numbers)]


def checked_by_layer(name: str, value: Any, least: int = 1, most: int = MAX_INT) -> ByLayer:
    """Return an option of type `ByLayer` after checks of its numbers; a list from JSON becomes a tuple.

    Raises:
        TypeError: if a number is not an int.
        ValueError: if a number is out of range, or there is none.
    """
    if not isinstance(value, list | tuple):
        check_int(name, value, least, most)
        return int(value)
    if not value:
        raise ValueError(f"{name} must be a number or a tuple of numbers, one for each layer, got {value}")
    for number in value:
        check_int(name, number, least, most)
    return tuple(value)


def check_has_layers(pattern: Technique, name: str, value: ByLayer, choices: SpecView) -> None:
    """Raise ValueError if an option has more numbers than the transformer has layers."""
    number = len(numbers_by_layer(value))
    if number > choices.layers:
        raise ValueError(
            f"{pattern} has {number} values of {name}, and the transformer has layers={choices.layers}; give "
            f"at most one value for each layer, or set layers={number}"
        )


def check_fits_heads(pattern: Technique, name: str, number: int, heads: int) -> None:
    """Raise ValueError if an option has more entries for heads than there are ``heads``."""
    if number > heads:
        raise ValueError(
            f"{pattern} has {number} {name} for {heads} heads, and does not use all of them; give at most "
            f"{heads}, or the transformer more heads"
        )
