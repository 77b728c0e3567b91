"""Textual description of the difference of two Gymnasium spaces, for error messages."""

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Tuple


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


def _describe_bounds(expected: Box[Any], given: Box[Any]) -> str:
    same = np.isclose(expected.low, given.low) & np.isclose(expected.high, given.high)
    first = tuple(int(i) for i in np.unravel_index(np.argmin(same), expected.shape))
    bounds, given_bounds = (f"[{box.low[first]}, {box.high[first]}]" for box in (expected, given))
    return f"expected the bounds {bounds} at index {first}, got {given_bounds}"


def _summary(space: Space[Any]) -> str:
    if isinstance(space, Box):
        return f"Box of shape {space.shape} and dtype {space.dtype}"
    return str(space)


def _subspaces(space: Any) -> dict[Any, Space[Any]]:
    return dict(space.spaces) if isinstance(space, Dict) else dict(enumerate(space.spaces))
