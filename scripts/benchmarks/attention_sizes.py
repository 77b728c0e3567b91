"""Sizes for measurements of attention."""

from math import isqrt

HEADS, SIZE = 4, 64
SUMMARIES = 128
"""Projected length of Linformer."""
CHUNK, ROUNDS = 64, 4
"""Chunk size and hash rounds of LSH; 2 L / chunk buckets, as in the paper."""
AROUND = 256
"""Window size of Longformer, half of it on each side of a token."""
BLOCK = 64
"""Block size of local attention and BigBird, in tokens."""


def root(length: int) -> int:
    """Return the power of two nearest to the square root of a length."""
    return 1 << (isqrt(length) * 3 // 2).bit_length() - 1
