"""Memory that the C library keeps between updates."""

import ctypes
import os
import platform

import torch

LARGEST_BLOCK = 31 * 2**20
"""Bytes of a block just below the largest one, 32 MiB, to which the thresholds of glibc adapt."""
M_TRIM_THRESHOLD = -1
"""Number of the parameter of mallopt(3)."""
TRIM_THRESHOLD = 2**30
"""Bytes of free memory at the end of the heap that glibc keeps."""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for later allocations, up to 1 GiB at the end of the heap.

    glibc returns more free memory than a threshold to the operating system, and allocates blocks above
    another one outside of the heap. Each update allocates and frees the same blocks, and the pages of memory
    that was returned have to be mapped again. The second threshold adapts to the largest block outside of the
    heap that was freed, so this function allocates and frees such a block, without writing to it. The peak of
    the memory is the same, but the process may keep up to 1 GiB that it no longer uses. The first threshold
    is not changed with other allocators, and if an environment variable, such as ``MALLOC_TRIM_THRESHOLD_``
    or ``GLIBC_TUNABLES``, sets any parameter of malloc.

    Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    torch.empty(LARGEST_BLOCK, dtype=torch.uint8, device="cpu")
    if platform.libc_ver()[0] == "glibc" and not _is_configured():
        ctypes.pythonapi.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)  # of the process: opens no library


def _is_configured() -> bool:
    """Return whether the environment sets parameters of malloc."""
    variables = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    return variables or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
