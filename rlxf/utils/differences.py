"""First difference of two JSON values, for error messages."""

from typing import Any

KINDS = ("name", "type")
"""Keys that identify the object that a dictionary describes: name of a technique, type of a space."""


def first_difference(name: str, theirs: Any, ours: Any) -> tuple[str, Any, Any] | None:
    """Return the first place at which two JSON values differ, or None if they are equal.

    Dictionaries that describe objects of the same kind are compared entry by entry. Otherwise the result
    has the kinds: the names of two techniques, or the types of two spaces.

    Args:
        name: name of the compared value, e.g. "core".
        theirs: first value.
        ours: second value.

    Returns:
        Dotted name of the place, e.g. "core.residual.bias", and the two values at this place.
    """
    if theirs == ours:
        return None
    comparable = isinstance(theirs, dict) and isinstance(ours, dict) and _kind(theirs) == _kind(ours)
    if not comparable:
        return name, _kind(theirs) or theirs, _kind(ours) or ours
    keys = [*theirs, *(key for key in ours if key not in theirs)]
    differences = (first_difference(f"{name}.{key}", theirs.get(key), ours.get(key)) for key in keys)
    return next(difference for difference in differences if difference is not None)


def _kind(value: Any) -> Any:
    """Return the name or type of the object that a dictionary describes; None if it has neither."""
    return next((value[key] for key in KINDS if key in value), None) if isinstance(value, dict) else None
