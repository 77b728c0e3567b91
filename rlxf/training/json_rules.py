"""Rules for JSON values from files, checks of their fields, and the first difference of two values."""

import math
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Union, get_args, get_origin

from rlxf.utils.errors import CheckpointError

_REMEDY = "use another copy of the file"


@dataclass(frozen=True)
class Rule:
    """Set of values that are allowed for a field.

    Args:
        allowed: description for the error message, such as "an integer of at least 1".
        holds: predicate that returns whether a value is allowed.
    """

    allowed: str
    holds: Callable[[Any], bool]

    def __or__(self, other: "Rule") -> "Rule":
        """Return the rule that allows the values of either rule."""
        return Rule(
            f"{self.allowed} or {other.allowed}", lambda value: self.holds(value) or other.holds(value)
        )


def whole(least: float = -math.inf, most: float = math.inf) -> Rule:
    """Return the rule that allows integers from ``least`` to ``most``."""
    return Rule(
        "an integer" + _range(least, most), lambda value: type(value) is int and least <= value <= most
    )


def number(least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> Rule:
    """Return the rule that allows finite numbers from ``least`` to ``most`` and larger than ``above``."""

    def holds(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most and above < value < math.inf

    more = "" if above == -math.inf else f" of more than {above:g}"
    return Rule("a number" + more + _range(least, most), holds)


def _range(least: float, most: float) -> str:
    if least == -math.inf:
        return "" if most == math.inf else f" of at most {most}"
    return f" of at least {least}" if most == math.inf else f" from {least} to {most}"


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a string", lambda value: isinstance(value, str))
MAPPING = Rule("an object", lambda value: isinstance(value, dict))
NOTHING = Rule("null", lambda value: value is None)
TEXTS = Rule("a list of strings", lambda value: isinstance(value, list) and all(map(TEXT.holds, value)))
SCHEDULE = Rule("a number", number().holds) | Rule("an object that describes a schedule", MAPPING.holds)
ANYTHING = Rule("anything", lambda value: True)
_KINDS: dict[Any, Rule] = {
    int: whole(),
    float: number(),
    bool: FLAG,
    str: TEXT,
    dict: MAPPING,
    types.NoneType: NOTHING,
    Callable: SCHEDULE,
}


def rule_of(annotation: Any) -> Rule:
    """Return the rule for a type annotation; `ANYTHING` for types that are not plain JSON data."""
    origin = get_origin(annotation) or annotation
    if origin in (Union, types.UnionType):
        return reduce(or_, map(rule_of, get_args(annotation)))
    return _KINDS.get(origin, ANYTHING)


def check_fields(document: Any, rules: Mapping[str, Rule], where: str) -> None:
    """Raise CheckpointError unless a document has all required fields with allowed values.

    Args:
        document: JSON value from a file.
        rules: rules by name of the required field.
        where: name of the document, for the error message.
    """
    if not isinstance(document, dict):
        raise CheckpointError(
            f"the checkpoint's {where} is {reprlib.repr(document)}, not an object; {_REMEDY}"
        )
    for name, rule in rules.items():
        if name not in document:
            raise CheckpointError(f"the checkpoint's {where} lacks {name!r}; {_REMEDY}")
        if not rule.holds(document[name]):
            raise CheckpointError(
                f"the checkpoint's {where} has {name!r} = {reprlib.repr(document[name])}, which must be "
                f"{rule.allowed}; {_REMEDY}"
            )


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
