"""Memory that the C library keeps between updates."""

import torch

LARGEST_BLOCK = 31 * 2**20
"""Bytes of a block just below the largest one, 32 MiB, to which the thresholds of glibc adapt."""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for later allocations, up to 62 MiB at the end of the heap.

    glibc returns more free memory than a threshold to the operating system, and allocates blocks above
    another one outside of the heap. Each update allocates and frees the same blocks, and the pages of memory
    that was returned have to be mapped again. Both thresholds adapt to the largest block outside of the heap
    that was freed, so this function allocates and frees such a block, without writing to it. It has no effect
    with other allocators, and if an environment variable such as ``MALLOC_TRIM_THRESHOLD_`` sets a threshold.

    Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    torch.empty(LARGEST_BLOCK, dtype=torch.uint8, device="cpu")
