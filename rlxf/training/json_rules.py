"""Rules for JSON values from files and for arguments, and the first difference of two values."""

import math
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Union, get_args, get_origin

from rlxf.utils.checks import MAX_INT64
from rlxf.utils.errors import CheckpointError

_REMEDY = "use another copy of the file"


@dataclass(frozen=True)
class Rule:
    """Set of values that are allowed for a field of a file, and for an argument of a constructor.

    Args:
        allowed: description for the error message, such as "an integer of at least 1".
        holds: predicate that returns whether a value is allowed.
        types: types of the values; those of other values are wrong, whatever the value.
        argument: description for the message about an argument; None for ``allowed``.
    """

    allowed: str
    holds: Callable[[Any], bool]
    types: tuple[type, ...] = ()
    argument: str | None = None

    def __or__(self, other: "Rule") -> "Rule":
        """Return the rule that allows the values of either rule."""
        return Rule(
            f"{self.allowed} or {other.allowed}",
            lambda value: self.holds(value) or other.holds(value),
            self.types + other.types,
            f"{self.argument or self.allowed} or {other.argument or other.allowed}",
        )

    def check_argument(self, name: str, value: Any) -> None:
        """Raise an error unless the value of an argument is allowed.

        Raises:
            TypeError: if it is not of one of the ``types``.
            ValueError: if it is, but is not allowed.
        """
        if not self.holds(value):
            error = ValueError if type(value) in self.types else TypeError
            raise error(f"{name} must be {self.argument or self.allowed}, got {value!r}")


def whole(least: float = -math.inf, most: float = MAX_INT64) -> Rule:
    """Return the rule that allows integers from ``least`` to ``most``."""

    def holds(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    shown = math.inf if most == MAX_INT64 else most
    return Rule("an integer" + _range(least, shown), holds, (int,))


def number(
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> Rule:
    """Return the rule that allows finite numbers from ``least`` to ``most``, between ``above`` and ``below``.

    ``least`` and ``most`` are allowed, ``above`` and ``below`` are not.
    """

    def holds(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most and above < value < below

    allowed = "number" + _range(least, most, above, below)
    return Rule(f"a {allowed}", holds, (int, float), f"a finite {allowed}")


def _range(least: float, most: float, above: float = -math.inf, below: float = math.inf) -> str:
    if math.isfinite(least) and math.isfinite(most):
        return f" from {least} to {most}"
    bounds = {"at least": least, "more than": above, "at most": most, "less than": below}
    named = [f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound)]
    return f" of {' and '.join(named)}" if named else ""


def choice(*words: str) -> Rule:
    """Return the rule that allows some words."""
    return Rule(" or ".join(map(repr, words)), lambda value: value in words, (str,))


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a string", lambda value: isinstance(value, str))
MAPPING = Rule("an object", lambda value: isinstance(value, dict))
NOTHING = Rule("null", lambda value: value is None, argument="None")
TEXTS = Rule("a list of strings", lambda value: isinstance(value, list) and all(map(TEXT.holds, value)))
SCHEDULE = number() | Rule("an object that describes a schedule", MAPPING.holds)
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
