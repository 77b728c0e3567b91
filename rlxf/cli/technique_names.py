"""Parsing of the names and descriptions of techniques on the command line."""

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import reduce
from operator import and_, or_
from typing import Any

from rlxf.attention.techniques import HEADS, JOINTS, OPTIONAL, TECHNIQUES, technique_from_json

NONE, FITTING = "None", "fitting"
CHOOSABLE = {
    axis: [*([FITTING] if axis == "pattern" else []), *([NONE] if axis in OPTIONAL else []), *techniques]
    for axis, techniques in TECHNIQUES.items()
} | {"head": [*HEADS]}
"""Names that can be chosen for each axis and for output heads.

The pattern ``fitting`` is the largest one that fits the memory: a token attends to itself and to as many
earlier tokens as the memory holds.
"""

JOINING = {"|": or_, "&": and_}
"""Operators that join patterns, in the order of increasing precedence, as in Python."""


def find(axis: str, text: str) -> str:
    """Return the name of a technique; case, dashes and underscores in ``text`` are ignored.

    Raises:
        ValueError: if the technique does not exist.
    """
    name = _match(axis, text)
    if name is None:
        raise ValueError(f"unknown {axis} {text!r}; choose one of {', '.join(CHOOSABLE[axis])}")
    return name


def described(axis: str, text: str) -> bool:
    """Return whether the text is a JSON object or a combination of patterns instead of a name."""
    return text.lstrip().startswith("{") or _operator(axis, text) is not None


def read(axis: str, text: str) -> Any:
    """Parse a technique: a name, a JSON object with options, or a combination of patterns.

    Patterns are combined as in Python, ``strided & window | dilated``, where each is a name or a JSON object.

    Raises:
        TypeError, ValueError: if a technique or option does not exist, or the text is not valid JSON.
    """
    if operator := _operator(axis, text):
        return reduce(JOINING[operator], [read(axis, part.strip()) for part in text.split(operator)])
    if not text.lstrip().startswith("{"):
        return technique_from_json(axis, {"name": find(axis, text)})
    try:
        return technique_from_json(axis, json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{text} is not valid JSON: {error}") from error


def named(args: Sequence[str]) -> dict[str, str]:
    """Return axis -> name or description given with ``--core.AXIS``, without names that do not exist."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for axis in TECHNIQUES:
        parser.add_argument(f"--core.{axis}", dest=axis, nargs="?")
    given = vars(parser.parse_known_args(args)[0])
    return {axis: name for axis, text in given.items() if (name := _chosen(axis, text or ""))}


def _chosen(axis: str, text: str) -> str | None:
    return text if described(axis, text) else _match(axis, text)


def _operator(axis: str, text: str) -> str | None:
    """Return the operator with the lowest precedence in the text; None without operators.

    No option of a pattern is a text that contains an operator.
    """
    return next((sign for sign in JOINING if sign in text), None) if axis in JOINTS else None


def _match(axis: str, text: str) -> str | None:
    plain = text.replace("-", "").replace("_", "").lower()
    return next((name for name in CHOOSABLE[axis] if name.lower() == plain), None)
