"""The techniques by name, as they are written on a command line."""

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from rlxf.attention.techniques import HEADS, OPTIONAL, TECHNIQUES, technique_from_json

NONE, FITTING = "None", "fitting"
CHOOSABLE = {
    axis: [*([FITTING] if axis == "pattern" else []), *([NONE] if axis in OPTIONAL else []), *techniques]
    for axis, techniques in TECHNIQUES.items()
} | {"head": [*HEADS]}
"""The names of each axis and of output heads. With the fitting pattern, a token sees itself and what memory
holds."""


def find(axis: str, text: str) -> str:
    """The name that is meant; case, dashes and underscores do not matter.

    Raises:
        ValueError: if there is no such technique.
    """
    name = _match(axis, text)
    if name is None:
        raise ValueError(f"there is no {axis} named {text!r}; there are {', '.join(CHOOSABLE[axis])}")
    return name


def read(axis: str, text: str) -> Any:
    """The technique of that name with its defaults, or the one that a JSON object describes.

    Raises:
        ValueError: if there is no such technique or option, or the text is no JSON.
    """
    if not text.lstrip().startswith("{"):
        return technique_from_json(axis, {"name": find(axis, text)})
    try:
        return technique_from_json(axis, json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{text} is no JSON: {error}") from error


def named(args: Sequence[str]) -> dict[str, str]:
    """The techniques that are named by ``--core.AXIS NAME``, by axis; what does not exist is left out."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for axis in TECHNIQUES:
        parser.add_argument(f"--core.{axis}", dest=axis, nargs="?")
    given = vars(parser.parse_known_args(args)[0])
    return {axis: name for axis, text in given.items() if (name := _match(axis, text or ""))}


def _match(axis: str, text: str) -> str | None:
    plain = text.replace("-", "").replace("_", "").lower()
    return next((name for name in CHOOSABLE[axis] if name.lower() == plain), None)
