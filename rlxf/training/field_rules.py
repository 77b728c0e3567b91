"""Validation of the fields of a JSON document in a checkpoint by a table of rules."""

import math
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Union, get_args, get_origin

from rlxf.training.errors import CheckpointError

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


def _range(least: float | None, most: float | None) -> str:
    if least is None and most is None:
        return ""
    if most is None:
        return f" of at least {least}"
    return f" of at most {most}" if least is None else f" from {least} to {most}"


def whole(least: int | None = None, most: int | None = None) -> Rule:
    """Return the rule that allows integers from ``least`` to ``most``; None: no bound."""
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    return Rule("an integer" + _range(least, most), lambda value: type(value) is int and low <= value <= high)


def number(least: float | None = None, most: float | None = None, above: float | None = None) -> Rule:
    """Return the rule that allows finite numbers from ``least`` to ``most`` and larger than ``above``.

    None: no bound.
    """
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    floor = -math.inf if above is None else above

    def holds(value: Any) -> bool:
        return type(value) in (int, float) and low <= value <= high and floor < value < math.inf

    more = "" if above is None else f" of more than {above:g}"
    return Rule("a number" + more + _range(least, most), holds)


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
