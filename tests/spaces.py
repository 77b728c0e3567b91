"""Spaces that the tests share."""

from inspect import signature

from gymnasium.spaces import Discrete

HAS_DTYPE = "dtype" in signature(Discrete).parameters


def discrete(n: int, start: int = 0, dtype: str = "int64") -> Discrete:
    """Return a Discrete of the dtype; in Gymnasium 1.1, which has no other, of int64."""
    return Discrete(n, start=start, dtype=dtype) if HAS_DTYPE else Discrete(n, start=start)
