"""Strict JSON: what is written comes back equal, and what is read cannot surprise."""

import json
import math
from typing import Any

MAX_JSON_BYTES = 8 * 2**20
MAX_DEPTH = 64
_MEMORY = {b",": 48, b"[": 72, b"{": 128, b":": 160, b'"': 32}
"""Bytes of Python objects per separator, measured for the worst texts made of each."""


def dump_json(value: Any, indent: int | None = None) -> bytes:
    """Write a JSON value as UTF-8; tuples are written as lists.

    Args:
        value: dicts with string keys, lists, tuples, strings, numbers, booleans, None.
        indent: spaces per level for files that people read; None (default) writes one line.

    Raises:
        TypeError: if a key is no string or a value is none of the above.
        ValueError: if a number is NaN or infinite, the nesting exceeds 64, or the text exceeds 8 MiB.
    """
    _check_structure(value, MAX_DEPTH)
    data = json.dumps(value, allow_nan=False, indent=indent).encode()
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{len(data):,} bytes of JSON exceed {MAX_JSON_BYTES:,}; store arrays as tensors")
    return data


def json_memory(data: bytes) -> int:
    """Return an upper estimate of the memory, in bytes, that parsing a JSON text takes.

    Separators are counted without parsing, those inside of strings included.
    """
    per_byte = 3 if data.isascii() else 9
    return per_byte * len(data) + sum(size * data.count(mark) for mark, size in _MEMORY.items())


def load_json(data: bytes) -> Any:
    """Read one JSON value from UTF-8.

    Raises:
        ValueError: if the text is longer than 8 MiB, no JSON, nested deeper than 64, repeats a key,
            or holds NaN or a number beyond the range of float64.
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
    raise ValueError(f"{text} is no JSON number")


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
