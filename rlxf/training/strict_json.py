"""JSON texts and files, parsed and written with strict checks."""

import json
import math
import reprlib
import sys
from pathlib import Path
from typing import Any

from rlxf.utils.files import write_file

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
        TypeError: if a key is not a string, or a value has an unsupported type.
        ValueError: if a number is NaN, infinite or beyond the range of float64, the nesting exceeds 64
            levels, or the text exceeds 8 MiB.
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
            contains NaN, Infinity, or a number beyond the range of float64.
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


def load_json_file(path: Path) -> Any:
    """Parse the JSON value in a file, of which at most 8 MiB are read.

    Raises:
        ValueError: as in `load_json`.
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        return load_json(file.read(MAX_JSON_BYTES + 1))


def write_json_file(path: Path, value: Any) -> None:
    """Replace the content of a file atomically by a JSON value, with one member in each line.

    Raises:
        TypeError, ValueError: as in `dump_json`; the file is unchanged.
        OSError: if the file cannot be written; an existing one is unchanged.
    """
    write_file(path, dump_json(value, indent=2))


def load_json_object(path: Path, advice: str) -> dict[str, Any]:
    """Parse the JSON object in a file.

    Args:
        path: the file.
        advice: what to do with a damaged file, for messages.

    Raises:
        ValueError: if the file cannot be parsed, or contains another value.
        OSError: if the file cannot be read.
    """
    try:
        value = load_json_file(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; {advice}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} contains a {type(value).__name__}, not a JSON object; {advice}")
    return value


def _check_structure(value: Any, levels: int) -> None:
    if not isinstance(value, dict | list | tuple):
        _check_integer(value)
        return
    if levels == 0:
        raise ValueError(f"JSON nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        if others := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"JSON keys must be strings, got {others[0]!r}")
        value = value.values()
    for item in value:
        _check_structure(item, levels - 1)


def _check_integer(value: Any) -> None:
    if isinstance(value, int) and abs(value) > sys.float_info.max:  # numpy and torch raise OverflowError
        raise ValueError(f"the number {reprlib.repr(value)} is beyond the range of float64")


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
