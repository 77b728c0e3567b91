"""The techniques by name, as they are written on a command line."""

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
"""The names of each axis and of output heads. With the fitting pattern, a token sees itself and what memory
holds."""

JOINING = {"|": or_, "&": and_}
"""How patterns are joined, what binds them loosest first: as in Python."""


def find(axis: str, text: str) -> str:
    """The name that is meant; case, dashes and underscores do not matter.

    Raises:
        ValueError: if there is no such technique.
    """
    name = _match(axis, text)
    if name is None:
        raise ValueError(f"there is no {axis} named {text!r}; there are {', '.join(CHOOSABLE[axis])}")
    return name


def described(axis: str, text: str) -> bool:
    """Whether the text is more than a name: a JSON object, or a join of patterns."""
    return text.lstrip().startswith("{") or _joining(axis, text) is not None


def read(axis: str, text: str) -> Any:
    """The technique of that name with its defaults, that which a JSON object describes, or a join of such.

    Patterns join as in Python: ``strided & window | dilated``, each a name or a JSON object.

    Raises:
        TypeError, ValueError: if there is no such technique or option, or the text is no JSON.
    """
    if sign := _joining(axis, text):
        return reduce(JOINING[sign], [read(axis, part.strip()) for part in text.split(sign)])
    if not text.lstrip().startswith("{"):
        return technique_from_json(axis, {"name": find(axis, text)})
    try:
        return technique_from_json(axis, json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{text} is no JSON: {error}") from error


def named(args: Sequence[str]) -> dict[str, str]:
    """What ``--core.AXIS`` names or describes, by axis; names that do not exist are left out."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for axis in TECHNIQUES:
        parser.add_argument(f"--core.{axis}", dest=axis, nargs="?")
    given = vars(parser.parse_known_args(args)[0])
    return {axis: name for axis, text in given.items() if (name := _chosen(axis, text or ""))}


def _chosen(axis: str, text: str) -> str | None:
    return text if described(axis, text) else _match(axis, text)


def _joining(axis: str, text: str) -> str | None:
    """The sign that binds loosest, if there is one: no option of a pattern is a text with such a sign."""
    return next((sign for sign in JOINING if sign in text), None) if axis in JOINTS else None


def _match(axis: str, text: str) -> str | None:
    plain = text.replace("-", "").replace("_", "").lower()
    return next((name for name in CHOOSABLE[axis] if name.lower() == plain), None)
