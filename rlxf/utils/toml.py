"""Reading of TOML files that users write: limits of size, and lines for messages of errors."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 2**20
"""Maximum size of a file."""
MAX_PARTS = 64
"""Maximum number of parts of a key, and of levels of tables and lists. The memory of `tomllib` grows with the
square of the number of parts."""
STRING_OR_COMMENT = re.compile(
    r'''"""(?:(?!""")(?:\\.|.))*+(?:""")?|"(?:\\.|[^"\\\n])*+"?'''
    r"""|'{3}(?:(?!''').)*+(?:''')?|'[^'\n]*+'?|#[^\n]*+""",
    re.DOTALL,
)
"""Pattern of a text or comment. The end of a text is optional, so that a search takes linear time."""
AROUND_KEY = re.compile(r"[=,{}\[\]]")
PART = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
KEY = rf"{PART}(?:\s*\.\s*{PART})*"
DEFINITION = re.compile(rf"\s*(?:\[{{1,2}}\s*(?P<table>{KEY})\s*\]{{1,2}}\s*(?:#|$)|(?P<key>{KEY})\s*=)")
"""Pattern of a line that begins a table or sets a key."""


def read_text(path: Path, kind: str) -> str:
    """Return the text of a file.

    Args:
        path: the file.
        kind: name of such a file in messages, e.g. "experiment file".

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a regular file, has more than `MAX_BYTES`, or is not a text in UTF-8.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no {kind} {path}")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES:,} bytes, the limit of {kind}s")
    if b"\0" not in content:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError:
            pass
    raise ValueError(f"{path} is not a text in UTF-8")


def loads(text: str) -> dict[str, Any]:
    """Return the content of a TOML document.

    Raises:
        TOMLDecodeError: if the text is not TOML.
        ValueError: if a key has more than `MAX_PARTS` parts, or a number too many digits.
        RecursionError: if tables and lists are nested in more than `MAX_PARTS` levels.
    """
    _check_key_parts(text)
    document = tomllib.loads(text)
    _check_levels(document)
    return document


def _check_key_parts(text: str) -> None:
    plain = STRING_OR_COMMENT.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(plain.split("\n"), 1):
        if any(key.count(".") >= MAX_PARTS for key in AROUND_KEY.split(line)):
            raise ValueError(f"the key in line {number} has more than {MAX_PARTS} parts")


def _check_levels(document: dict[str, Any]) -> None:
    nested: list[Any] = [document]
    for _ in range(MAX_PARTS):
        values = (value for each in nested for value in (each.values() if isinstance(each, dict) else each))
        nested = [value for value in values if isinstance(value, dict | list)]
    if nested:
        raise RecursionError(f"tables and lists are nested in more than {MAX_PARTS} levels")


def line_of(text: str, full_name: str) -> int | None:
    """Return the number of the line of a TOML document that sets a key or begins a table.

    If there is none, the line of the closest parent is returned, e.g. that of a table in one line.

    Args:
        text: the document.
        full_name: name with dots. Dashes and underscores are equivalent, and first parts may be missing: the
            complete name has precedence, and then the first line.

    Returns:
        The number from 1 on; None if no line is found.
    """
    lines = _lines(text)
    name = _plain(full_name)
    while name:
        if name in lines:
            return lines[name]
        if found := [line for other, line in lines.items() if other.endswith(f".{name}")]:
            return min(found)
        name = name.rpartition(".")[0]
    return None


def _lines(text: str) -> dict[str, int]:
    """Return full name -> number of the first line that sets a key or a part of it, or begins a table."""
    lines: dict[str, int] = {}
    for number, name in _definitions(text):
        while name:
            lines.setdefault(name, number)
            name = name.rpartition(".")[0]
    return lines


def _definitions(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number of each line that sets a key or begins a table, and the full name."""
    table = ""
    for number, line in enumerate(text.split("\n"), 1):
        match = DEFINITION.match(line)
        if match and match["table"]:
            table = _plain(match["table"])
            yield number, table
        elif match:
            key = _plain(match["key"])
            yield number, f"{table}.{key}" if table else key


def _plain(key: str) -> str:
    """Return a key without spaces and quotes, and with underscores for dashes."""
    return re.sub(r"[\s\"']", "", key).replace("-", "_")
