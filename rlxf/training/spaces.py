"""Spaces of Gymnasium as JSON, and differences between two spaces."""

import math
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from numpy.typing import NDArray

from rlxf.utils.memory_budget import MemoryBudgetError, check_budget

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64")


def _box_to_json(box: Box) -> dict[str, Any]:
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


def _box_from_json(shape: list[int], dtype: str, low: Any, high: Any) -> Box:
    """Build the Box that `_box_to_json` described.

    Raises:
        ValueError: if the dtype is not in `DTYPES`, or the bounds do not fit the shape.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    kind = np.dtype(dtype)
    least, most = _limits(kind)
    below, bounded_below = _decode_bound(low, shape, kind, "-inf", least)
    above, bounded_above = _decode_bound(high, shape, kind, "inf", most)
    box = Box(below, above, dtype=kind.type)
    # The bounds of an unbounded integer Box are the limits of its dtype; only these masks mark it unbounded.
    box.bounded_below, box.bounded_above = bounded_below, bounded_above
    return box


def _encode(values: NDArray[Any], bounded: NDArray[np.bool_], unbounded: str) -> Any:
    values, bounded = np.ravel(values), np.ravel(bounded)
    # np.signbit distinguishes 0.0 and -0.0, which are equal.
    keys = [values, np.signbit(values), bounded]
    constant = bool(values.size) and all((key == key[0]).all() for key in keys)
    entries = slice(1) if constant else slice(None)
    pairs = zip(values[entries].tolist(), bounded[entries].tolist(), strict=True)
    numbers = [_finite_or_name(value) if finite else unbounded for value, finite in pairs]
    return numbers[0] if constant else numbers


def _finite_or_name(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _decode_bound(
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


SPACE_BYTES = 2**14
"""Upper estimate of the memory of a space without its arrays, and of the policy modules for the space."""
BOUND_BYTES = 48
"""Upper estimate of the memory per element of a Box: two bounds, their masks, and a flattened value."""
CHOICE_BYTES = 64
"""Upper estimate of the memory per discrete choice or bit: one-hot values, and a Python list of sizes."""
CHARACTER_BYTES = 512
"""Upper estimate of the memory per character of a Text: Gymnasium creates a set, a tuple and a dict."""


def space_to_json(space: Space[Any]) -> dict[str, Any]:
    """Convert a space to a JSON object ``{"type": "Box", ...}``.

    Bounds are stored exactly, infinite bounds as "inf" and "-inf". A bound with equal entries is stored as
    one number. The state of the random number generator of the space is not stored.

    Args:
        space: a Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict or Tuple, with any nesting.

    Raises:
        TypeError: if the space or a subspace is of an unsupported class (subclasses are not accepted), or is
            a Box whose dtype is none of bool, integers and floats of at most 64 bits.
    """
    name = type(space).__name__
    if type(space) not in _ENCODERS:
        raise TypeError(f"a space of class {name} cannot be stored; use one of {', '.join(_DECODERS)}")
    return {"type": name, **_ENCODERS[type(space)](space)}


def space_from_json(data: dict[str, Any], file_bytes: int = 0) -> Space[Any]:
    """Build the space that `space_to_json` described.

    Args:
        data: JSON description of the space.
        file_bytes: bytes of the arrays in the file that contains the description. The memory limit of a space
            increases with the size of its file.

    Raises:
        ValueError: if ``data`` does not describe a space.
        MemoryBudgetError: if the space requires more memory than the budget (`rlxf.utils.memory_budget`).
    """
    try:
        check_budget({reprlib.repr(data): _space_memory(data)}, file_bytes)
        return _decode(data)
    except MemoryBudgetError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, AssertionError, OverflowError) as error:
        raise ValueError(f"{reprlib.repr(data)} does not describe a space ({error})") from error


def _space_memory(data: dict[str, Any]) -> int:
    """Return an upper estimate of the memory, in bytes, of a described space and one flattened value of it.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: if ``data`` does not describe a space.
    """
    if "spaces" in data:
        parts = data["spaces"]
        return SPACE_BYTES + sum(map(_space_memory, parts.values() if isinstance(parts, dict) else parts))
    bounds = _product(data.get("shape", [0]))
    bits = data.get("n", 0)
    choices = _product(bits if isinstance(bits, list) else [bits]) + _sum(data.get("nvec", 0))
    text = CHARACTER_BYTES * len(data.get("characters", ""))
    return SPACE_BYTES + BOUND_BYTES * bounds + CHOICE_BYTES * choices + text


def _product(sizes: list[int]) -> int:
    return math.prod(map(_whole, sizes))


def _sum(sizes: int | list[Any]) -> int:
    return sum(map(_sum, sizes)) if isinstance(sizes, list) else _whole(sizes)


def _whole(size: Any) -> int:
    if type(size) is not int or size < 0:
        raise ValueError(f"a size must be an integer of at least 0, got {size!r}")
    return size


def _decode(data: dict[str, Any]) -> Space[Any]:
    fields = dict(data)
    if fields.get("type") not in _DECODERS:
        raise ValueError(f"its type must be one of {', '.join(_DECODERS)}")
    return _DECODERS[fields.pop("type")](**fields)


def _integer(dtype: str) -> type[np.integer[Any]]:
    if dtype not in INTEGERS:
        raise ValueError(f"dtype must be one of {', '.join(INTEGERS)}, got {dtype!r}")
    return np.dtype(dtype).type


def _discrete_from_json(n: int, start: int, dtype: str) -> "Discrete[Any]":
    """Build a Discrete; without a dtype if it is int64, the only one of Gymnasium 1.1."""
    kind = _integer(dtype)
    return Discrete(n, start=start) if kind is np.int64 else Discrete(n, start=start, dtype=kind)


_ENCODERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    Box: _box_to_json,
    Discrete: lambda space: {"n": int(space.n), "start": int(space.start), "dtype": space.dtype.name},
    MultiDiscrete: lambda space: {
        "nvec": space.nvec.tolist(),
        "start": space.start.tolist(),
        "dtype": space.dtype.name,
    },
    MultiBinary: lambda space: {"n": space.n if isinstance(space.n, int) else list(space.n)},
    Text: lambda space: {
        "min_length": int(space.min_length),
        "max_length": int(space.max_length),
        "characters": space.characters,
    },
    Dict: lambda space: {"spaces": {key: space_to_json(part) for key, part in space.spaces.items()}},
    Tuple: lambda space: {"spaces": [space_to_json(part) for part in space.spaces]},
}
"""Function that returns the constructor arguments of a space as JSON, by class of the space."""
_DECODERS: dict[str, Callable[..., Space[Any]]] = {
    "Box": _box_from_json,
    "Discrete": _discrete_from_json,
    "MultiDiscrete": lambda nvec, start, dtype: MultiDiscrete(nvec, dtype=_integer(dtype), start=start),
    "MultiBinary": MultiBinary,
    "Text": lambda min_length, max_length, characters: Text(
        max_length, min_length=min_length, charset=characters
    ),
    # Pairs keep their order; Gymnasium would sort a dict.
    "Dict": lambda spaces: Dict([(key, _decode(part)) for key, part in spaces.items()]),
    "Tuple": lambda spaces: Tuple(map(_decode, spaces)),
}
"""Function that builds a space from these arguments, by the name of its class."""


def describe_difference(expected: Space[Any], given: Space[Any]) -> str:
    """Describe the difference of two spaces in one line; return the empty string if they are equal.

    Bounds are compared with the tolerance of numpy's ``allclose``, as in Gymnasium.

    Example: ``"in 'image': expected Box of shape (84, 84, 3) and dtype uint8, got Discrete(3)"``.
    """
    if type(expected) is type(given) and expected == given:
        return ""
    if isinstance(expected, Dict | Tuple) and type(expected) is type(given):
        return _describe_subspaces(_subspaces(expected), _subspaces(given))
    if isinstance(expected, Box) and isinstance(given, Box) and _summary(expected) == _summary(given):
        return _describe_bounds(expected, given)
    return f"expected {_summary(expected)}, got {_summary(given)}"


def _describe_subspaces(expected: dict[Any, Space[Any]], given: dict[Any, Space[Any]]) -> str:
    if expected.keys() != given.keys():
        return f"expected the subspaces {list(expected)}, got {list(given)}"
    differences = {key: describe_difference(expected[key], given[key]) for key in expected}
    return "; ".join(f"in {key!r}: {difference}" for key, difference in differences.items() if difference)


def _describe_bounds(expected: Box, given: Box) -> str:
    same = np.isclose(expected.low, given.low) & np.isclose(expected.high, given.high)
    first = tuple(int(i) for i in np.unravel_index(np.argmin(same), expected.shape))
    bounds, given_bounds = (f"[{box.low[first]}, {box.high[first]}]" for box in (expected, given))
    return f"expected the bounds {bounds} at index {first}, got {given_bounds}"


def _summary(space: Space[Any]) -> str:
    return f"Box of shape {space.shape} and dtype {space.dtype}" if isinstance(space, Box) else str(space)


def _subspaces(space: Any) -> dict[Any, Space[Any]]:
    return dict(space.spaces) if isinstance(space, Dict) else dict(enumerate(space.spaces))
