"""Limit on the memory that loading a file may require beyond the size of the file.

A few bytes in a file can specify a space, a width or a memory length whose arrays exceed the memory of any
machine. Readers therefore estimate the size of the described objects before they build them, and compare the
sum with this budget.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from rlxf.utils.checks import MAX_INT64, check_int

VARIABLE = "RLXF_MEMORY_BUDGET"
"""Environment variable that sets the budget, in bytes."""
DEFAULT = 128 * 2**20
"""Budget, in bytes, if neither `memory_budget` nor the environment variable sets one."""
BUDGET_PER_FILE_BYTE = 4
"""Bytes of memory that are allowed per byte of the arrays in a file, in addition to the budget."""

_chosen: ContextVar[int | None] = ContextVar("memory_budget", default=None)


class MemoryBudgetError(ValueError):
    """Raised if a file requires more memory than the budget allows.

    The message states the required size, its largest parts, the budget, and the setting that raises it.
    """


@contextmanager
def memory_budget(max_bytes: int) -> Iterator[None]:
    """Set the memory that a file may require beyond its own size, inside a ``with`` block.

    The budget applies to checkpoints, statistics files and datasets that this thread reads. Data stored in
    the file, such as weights or recorded episodes, do not count. Outside of a block, the environment variable
    ``RLXF_MEMORY_BUDGET`` (bytes) sets the budget. The default is 128 MiB; ordinary files need far less.

    Example::

        with rlxf.training.memory_budget(2 * 2**30):
            agent = GTrXLPPO.load("long_memory.zip")

    Args:
        max_bytes: the budget, at least 1.

    Raises:
        TypeError: if max_bytes is not an integer.
        ValueError: if max_bytes is less than 1.
    """
    check_int("max_bytes", max_bytes, most=MAX_INT64)
    token = _chosen.set(max_bytes)
    try:
        yield
    finally:
        _chosen.reset(token)


def budget_bytes() -> int:
    """Return the budget in bytes, from `memory_budget`, else ``RLXF_MEMORY_BUDGET``, else 128 MiB.

    Raises:
        ValueError: if the environment variable is set, but is not an integer of at least 1.
    """
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    text = os.environ.get(VARIABLE) or str(DEFAULT)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{VARIABLE} must be an integer number of bytes, at least 1, got {text!r}")
    return int(text)


def check_budget(required: Mapping[str, int], file_bytes: int = 0) -> None:
    """Raise MemoryBudgetError if the memory requirements of a file exceed the budget.

    Args:
        required: required bytes by purpose; upper estimates made before anything is built.
        file_bytes: bytes of arrays stored in the file; `BUDGET_PER_FILE_BYTE` times this size is allowed in
            addition.
    """
    total = sum(required.values())
    allowed = budget_bytes() + BUDGET_PER_FILE_BYTE * file_bytes
    if total <= allowed:
        return
    largest = sorted(required, key=lambda name: -required[name])[:3]
    parts = ", ".join(f"{_readable(required[name])} for {name}" for name in largest if required[name])
    needed = (total - BUDGET_PER_FILE_BYTE * file_bytes) * 21 // 20  # margin for sizes not known in advance
    raise MemoryBudgetError(
        f"the file requires {_readable(total)} of memory ({parts}), but the budget is {_readable(allowed)}; "
        f"if you trust the file, raise the budget with {VARIABLE}={needed} or "
        f"rlxf.training.memory_budget({needed})"
    )


def _readable(size: int) -> str:
    """Format a size as ``"1.9 GB"``, in powers of 1000."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} bytes"
