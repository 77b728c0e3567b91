"""JSON serialization of Gymnasium spaces of a fixed set of classes."""

import math
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from rlxf.training.box_bounds import INTEGERS, box_from_json, box_to_json
from rlxf.utils.memory_budget import MemoryBudgetError, check_budget

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
        TypeError: if the space or a subspace is of another class (subclasses are not accepted), or is a Box
            with a dtype other than bool, and integer or float of at most 64 bits.
    """
    name = type(space).__name__
    if name not in _CODECS or type(space) is not _CODECS[name].kind:
        raise TypeError(f"a space of class {name} cannot be stored; use one of {', '.join(_CODECS)}")
    return {"type": name, **_CODECS[name].encode(space)}


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
        check_budget({reprlib.repr(data): space_memory(data)}, file_bytes)
        return _decode(data)
    except MemoryBudgetError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, AssertionError, OverflowError) as error:
        raise ValueError(f"{reprlib.repr(data)} does not describe a space ({error})") from error


def space_memory(data: dict[str, Any]) -> int:
    """Return an upper estimate of the memory, in bytes, of a described space and one flattened value of it.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: if ``data`` does not describe a space.
    """
    if "spaces" in data:
        parts = data["spaces"]
        return SPACE_BYTES + sum(map(space_memory, parts.values() if isinstance(parts, dict) else parts))
    bounds, bits = _product(data.get("shape", [0])), data.get("n", 0)
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
    if fields.get("type") not in _CODECS:
        raise ValueError(f"its type must be one of {', '.join(_CODECS)}")
    return _CODECS[fields.pop("type")].decode(**fields)


def _discrete_to_json(space: Discrete[Any]) -> dict[str, Any]:
    return {"n": int(space.n), "start": int(space.start), "dtype": space.dtype.name}


def _discrete_from_json(n: int, start: int, dtype: str) -> Discrete[Any]:
    return Discrete(n, start=start, dtype=_integer(dtype))


def _multi_discrete_to_json(space: MultiDiscrete[Any]) -> dict[str, Any]:
    return {"nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": space.dtype.name}


def _multi_discrete_from_json(nvec: list[Any], start: list[Any], dtype: str) -> MultiDiscrete[Any]:
    return MultiDiscrete(nvec, dtype=_integer(dtype), start=start)


def _integer(dtype: str) -> type[np.integer[Any]]:
    if dtype not in INTEGERS:
        raise ValueError(f"dtype must be one of {', '.join(INTEGERS)}, got {dtype!r}")
    return np.dtype(dtype).type


def _multi_binary_to_json(space: MultiBinary) -> dict[str, Any]:
    return {"n": space.n if isinstance(space.n, int) else list(space.n)}


def _text_to_json(space: Text) -> dict[str, Any]:
    return {
        "min_length": int(space.min_length),
        "max_length": int(space.max_length),
        "characters": space.characters,
    }


def _text_from_json(min_length: int, max_length: int, characters: str) -> Text:
    return Text(max_length, min_length=min_length, charset=characters)


def _dict_to_json(space: Dict) -> dict[str, Any]:
    return {"spaces": {key: space_to_json(part) for key, part in space.spaces.items()}}


def _dict_from_json(spaces: dict[str, Any]) -> Dict:
    # Pairs keep their order; Gymnasium would sort a dict.
    return Dict([(key, _decode(part)) for key, part in spaces.items()])


def _tuple_to_json(space: Tuple) -> dict[str, Any]:
    return {"spaces": [space_to_json(part) for part in space.spaces]}


def _tuple_from_json(spaces: list[Any]) -> Tuple:
    return Tuple(map(_decode, spaces))


class _Codec(NamedTuple):
    kind: type
    encode: Callable[[Any], dict[str, Any]]
    decode: Callable[..., Space[Any]]


_CODECS = {
    "Box": _Codec(Box, box_to_json, box_from_json),
    "Discrete": _Codec(Discrete, _discrete_to_json, _discrete_from_json),
    "MultiDiscrete": _Codec(MultiDiscrete, _multi_discrete_to_json, _multi_discrete_from_json),
    "MultiBinary": _Codec(MultiBinary, _multi_binary_to_json, MultiBinary),
    "Text": _Codec(Text, _text_to_json, _text_from_json),
    "Dict": _Codec(Dict, _dict_to_json, _dict_from_json),
    "Tuple": _Codec(Tuple, _tuple_to_json, _tuple_from_json),
}
