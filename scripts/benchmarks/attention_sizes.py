"""Sizes that ours and others' attention are measured with."""

from collections.abc import Callable
from math import isqrt

from torch import Tensor

HEADS, SIZE = 4, 64
SUMMARIES = 128
"""Of Linformer."""
CHUNK, ROUNDS = 64, 4
"""Of LSH: 2 L / chunk buckets, as the paper has it."""
AROUND = 256
"""Keys around a token that Longformer's window holds, half of them on each side."""
BLOCK = 64
"""Of local windows and of BigBird, in tokens."""

Pass = Callable[[Tensor], Tensor]
"""x (1, L, C) -> (1, L, C)."""


def root(length: int) -> int:
    """The power of two nearest to the root of a length."""
    return 1 << (isqrt(length) * 3 // 2).bit_length() - 1
