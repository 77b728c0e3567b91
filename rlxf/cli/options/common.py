"""Types, help texts and checks of options that several commands share."""

import ast
import inspect
import json
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from math import inf
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

Options = TypeVar("Options")
DIGITS = 18
"""Largest exponent of ten of a count; 10**18 exceeds the steps of any training."""
SUFFIXES = {"k": "e3", "K": "e3", "M": "e6"}
"""Suffix of a count -> exponent of ten."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: type[Options]) -> type[Options]:
    """Class decorator for a frozen dataclass of options, with keywords only.

    The docstring after a field is its help text. tyro would keep the line breaks of a docstring and wrap each
    of its lines again; here the lines of a docstring are one paragraph.
    """
    (definition,) = ast.parse(dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for line, after in pairwise(definition.body):
        if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(line.target, ast.Name)
            text = " ".join(ast.literal_eval(after.value).split())
            annotation = cls.__annotations__[line.target.id]
            cls.__annotations__[line.target.id] = Annotated[annotation, arg(help=text)]
    return dataclass(frozen=True, kw_only=True)(cls)


class NotACountError(Exception):
    """Error for an argument that is not a whole number.

    It is not a ValueError, because tyro prints the whole help text next to a ValueError.

    Args:
        text: the argument.
    """

    def __init__(self, text: str):
        super().__init__(f"must be a whole number such as 100000, 100_000, 100k or 1e5, got {text}")
        self.text = text

    def message(self, args: Sequence[str]) -> str:
        """Return the message, prefixed with the option in ``args`` that has this value."""
        options = [args[place - 1] for place, word in enumerate(args) if place and word == self.text]
        options += [word.partition("=")[0] for word in args if word.endswith(f"={self.text}")]
        return f"{options[0] if options else 'a count'} {self}"


def whole_number(text: str) -> int:
    """Parse a whole number such as ``100000``, ``100_000``, ``1e5``, ``100k`` or ``1.5M``.

    Raises:
        NotACountError: if the text is not a number, has a fractional part, or is 10**19 or more.
    """
    try:
        number = Decimal(re.sub(r"(?<=[\d.])[kKM]$", lambda suffix: SUFFIXES[suffix[0]], text))
    except InvalidOperation:
        raise NotACountError(text) from None
    if not number.is_finite() or number.adjusted() > DIGITS or number != number.to_integral_value():
        raise NotACountError(text)
    return int(number)


def _read(words: list[str]) -> int:
    if words == ["None"]:  # tyro then tries the None of an optional count
        raise ValueError(words[0])
    return whole_number(words[0])


Count = Annotated[
    int,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=_read,
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda number: [str(number)],
    ),
]
"""Type of an option that is a count; it is parsed by `whole_number`."""
Json = Annotated[dict[str, Any], arg(constructor=json.loads, metavar="JSON")]
"""Type of an option that is a JSON object."""
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    arg(help='Device of the tensors. "auto" selects the GPU if there is one.'),
]
"""Option of all commands that use torch."""
Trust = Annotated[
    bool,
    arg(
        help="Trust the authors of the run and of its data. The module that their environment names is "
        "imported, and its arguments and wrappers are used. Without this flag, only registered environments "
        "are used."
    ),
]
"""Option of all commands that read a run."""
Quiet = Annotated[
    bool,
    arg(help="Print only warnings, errors and the final result, without settings and progress."),
]
"""Option of all commands that train."""
Pretrained = Annotated[
    Path | None,
    arg(help='Folder of a run with initial weights, e.g. of "rlxf pretrain". None means random weights.'),
]
"""Option of all commands that train an agent."""
CheckpointSeconds = Annotated[
    float,
    arg(help='Seconds between two checkpoints for "rlxf resume". The last three are kept.'),
]
"""Option of all commands whose training can be resumed."""
LogInterval = Annotated[Count, arg(help="Number of updates between two log entries.")]
"""Option of all commands that train on datasets."""


def given_options(args: Sequence[str], *names: str) -> dict[str, str]:
    """Return name -> value of the options ``--NAME VALUE`` and ``--NAME=VALUE`` that are in ``args``."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(f"--{name}", dest=name, nargs="?")
    return {name: value for name, value in vars(parser.parse_known_args(args)[0]).items() if value}


def check_counts(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is None or at least 1."""
    for name in names:
        count = getattr(options, name)
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def check_from_zero(options: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is None, or is finite and at least 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value < inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
