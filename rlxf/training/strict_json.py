"""Strict reading and writing of JSON, and rules for the values of its fields."""

import json
import math
import reprlib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Union, get_args, get_origin

from rlxf.training.errors import CheckpointError

MAX_JSON_BYTES = 8 * 2**20
MAX_DEPTH = 64
_MEMORY = {b",": 48, b"[": 72, b"{": 128, b":": 160, b'"': 32}
"""Bytes of Python objects per separator, measured on worst-case texts for each separator."""


def dump_json(value: Any, indent: int | None = None) -> bytes:
    """Serialize a JSON value as UTF-8; tuples are written as lists.

    Args:
        value: dicts with string keys, lists, tuples, strings, numbers, booleans and None.
        indent: spaces per level, for human-readable files; None (default) writes one line.

    Raises:
        TypeError: if a key is not a string, or a value has another type.
        ValueError: if a number is NaN or infinite, the nesting exceeds 64 levels, or the text exceeds 8 MiB.
    """
    _check_structure(value, MAX_DEPTH)
    data = json.dumps(value, allow_nan=False, indent=indent).encode()
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{len(data):,} bytes of JSON exceed {MAX_JSON_BYTES:,}; store arrays as tensors")
    return data


def json_memory(data: bytes) -> int:
    """Return an upper estimate of the memory of a parsed JSON text, in bytes.

    The estimate counts separators, including those inside of strings, without parsing.
    """
    per_byte = 3 if data.isascii() else 9
    return per_byte * len(data) + sum(size * data.count(mark) for mark, size in _MEMORY.items())


def load_json(data: bytes) -> Any:
    """Parse one JSON value from UTF-8.

    Raises:
        ValueError: if the text exceeds 8 MiB, is not JSON, is nested deeper than 64 levels, repeats a key, or
            contains NaN or a number beyond the range of float64.
    """
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{len(data):,} bytes of JSON exceed {MAX_JSON_BYTES:,}")
    try:
        value = json.loads(
            data.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            object_pairs_hook=_unique_keys,
        )
    except RecursionError:
        raise ValueError(f"JSON nested deeper than {MAX_DEPTH}") from None
    _check_structure(value, MAX_DEPTH)
    return value


def _check_structure(value: Any, levels: int) -> None:
    if not isinstance(value, dict | list | tuple):
        return
    if levels == 0:
        raise ValueError(f"JSON nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        _check_keys(value)
        value = value.values()
    for item in value:
        _check_structure(item, levels - 1)


def _check_keys(value: dict[Any, Any]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"JSON keys must be strings, got {key!r}")


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text} is beyond the range of float64")
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a JSON object repeats a key")
    return result


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
