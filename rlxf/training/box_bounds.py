"""Lossless JSON serialization of Box spaces."""

import math
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64")


def box_to_json(box: Box[Any]) -> dict[str, Any]:
    """Return ``{"shape", "dtype", "low", "high"}``; a bound with equal entries is stored as one number.

    Raises:
        TypeError: if the dtype is not in `DTYPES`.
    """
    if box.dtype.name not in DTYPES:
        raise TypeError(f"a Box of dtype {box.dtype} cannot be stored; use one of {', '.join(DTYPES)}")
    return {
        "shape": list(box.shape),
        "dtype": box.dtype.name,
        "low": _encode(box.low, box.bounded_below, "-inf"),
        "high": _encode(box.high, box.bounded_above, "inf"),
    }


def box_from_json(shape: list[int], dtype: str, low: Any, high: Any) -> Box[Any]:
    """Build the Box that `box_to_json` described.

    Raises:
        ValueError: if the dtype is not in `DTYPES`, or the bounds do not fit the shape.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    kind = np.dtype(dtype)
    least, most = _limits(kind)
    below, bounded_below = _decode(low, shape, kind, "-inf", least)
    above, bounded_above = _decode(high, shape, kind, "inf", most)
    box = Box(below, above, dtype=kind.type)
    # The bounds of an unbounded integer Box are the limits of its dtype; only these masks mark it unbounded.
    box.bounded_below, box.bounded_above = bounded_below, bounded_above
    return box


def _encode(values: NDArray[Any], bounded: NDArray[np.bool_], unbounded: str) -> Any:
    values, bounded = np.ravel(values), np.ravel(bounded)
    constant = bool(values.size and (values == values[0]).all() and (bounded == bounded[0]).all())
    entries = slice(1) if constant else slice(None)
    pairs = zip(values[entries].tolist(), bounded[entries].tolist(), strict=True)
    numbers = [_finite_or_name(value) if finite else unbounded for value, finite in pairs]
    return numbers[0] if constant else numbers


def _finite_or_name(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _decode(
    stored: Any, shape: list[int], kind: np.dtype[Any], unbounded: str, limit: float
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return bounds and the mask of finite bounds, both of the given shape; one number fills all entries."""
    numbers = stored if isinstance(stored, list) else [stored]
    with np.errstate(over="ignore"):  # as in Gymnasium, a number outside of the dtype's range is infinite
        values = np.array([limit if number == unbounded else _number(number) for number in numbers], kind)
    bounded = np.array([number != unbounded for number in numbers], bool)
    if isinstance(stored, list):
        return values.reshape(shape), bounded.reshape(shape)
    return np.full(shape, values[0]), np.full(shape, bounded[0])


def _number(stored: float | str) -> float:
    return float(stored) if isinstance(stored, str) else stored


def _limits(kind: np.dtype[Any]) -> tuple[float, float]:
    if kind.kind not in "iu":
        return -math.inf, math.inf
    limits = np.iinfo(kind)
    return limits.min, limits.max
