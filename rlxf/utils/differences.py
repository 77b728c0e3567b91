"""Find where two pieces of plain data differ, to name that place in an error."""

from typing import Any

KINDS = ("name", "type")
"""Keys that identify the object of a dictionary: the name of a technique, the type of a space."""


def first_difference(name: str, theirs: Any, ours: Any) -> tuple[str, Any, Any] | None:
    """Return the first place in which two JSON values differ, None if they are equal.

    Dictionaries that describe the same kind of thing are compared entry by entry, others as a whole: of two
    techniques only the names count, of two spaces only the types.

    Args:
        name: of the place, e.g. "core".
        theirs: one value.
        ours: the other.

    Returns:
        Dotted name of the place, e.g. "core.residual.bias", and the two values there.
    """
    if theirs == ours:
        return None
    alike = isinstance(theirs, dict) and isinstance(ours, dict) and _kind(theirs) == _kind(ours)
    if not alike:
        return name, _kind(theirs) or theirs, _kind(ours) or ours
    keys = [*theirs, *(key for key in ours if key not in theirs)]
    found = (first_difference(f"{name}.{key}", theirs.get(key), ours.get(key)) for key in keys)
    return next(difference for difference in found if difference is not None)


def _kind(value: Any) -> Any:
    """Return the name of the object that a dictionary describes; None if it has none."""
    return next((value[key] for key in KINDS if key in value), None) if isinstance(value, dict) else None
