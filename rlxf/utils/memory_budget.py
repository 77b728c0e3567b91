"""Limit on the memory that a file may require beyond its own size.

A few letters in a file can name a space, a width or a memory length whose arrays fill any machine. Readers
therefore compute the size of the objects in a file before building them and compare the sum with this budget.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

VARIABLE = "RLXF_MEMORY_BUDGET"
"""Environment variable that sets the budget, in bytes."""
DEFAULT = 128 * 2**20
FILE_SHARE = 4
"""Bytes that a file may require per byte of its arrays, in addition to the budget."""

_chosen: ContextVar[int | None] = ContextVar("memory_budget", default=None)


class MemoryBudgetError(ValueError):
    """Raised if a file requires more memory than the budget allows.

    The message names the requested size, its largest parts, the budget and how to raise it.
    """


@contextmanager
def memory_budget(max_bytes: int) -> Iterator[None]:
    """Set the memory that a file may require beyond its own size, inside a ``with`` block.

    It applies to checkpoints, statistics files and datasets that are read in this thread. What a file brings
    itself, such as weights or recorded episodes, does not count. Outside of a block the environment variable
    ``RLXF_MEMORY_BUDGET`` (bytes) sets the budget; the default of 128 MiB is far above what ordinary files
    need.

    Example::

        with rlxf.training.memory_budget(2 * 2**30):
            agent = GTrXLPPO.load("long_memory.zip")

    Args:
        max_bytes: the budget, at least 1.

    Raises:
        TypeError: if max_bytes is no whole number.
        ValueError: if it is less than 1.
    """
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool):
        raise TypeError(f"max_bytes must be a whole number of bytes, got {max_bytes!r}")
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    token = _chosen.set(max_bytes)
    try:
        yield
    finally:
        _chosen.reset(token)


def budget_bytes() -> int:
    """Return the budget in bytes: that of `memory_budget`, else of ``RLXF_MEMORY_BUDGET``, else 128 MiB.

    Raises:
        ValueError: if the environment variable is set and is no whole number of at least 1.
    """
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    text = os.environ.get(VARIABLE) or str(DEFAULT)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{VARIABLE} must be a whole number of bytes, at least 1, got {text!r}")
    return int(text)


def check_budget(asked: Mapping[str, int], file_bytes: int = 0) -> None:
    """Raise MemoryBudgetError if the requirements of a file exceed the budget.

    Args:
        asked: bytes by purpose, estimated from above before anything is built.
        file_bytes: bytes of arrays that the file brings; `FILE_SHARE` times as many are allowed on top.
    """
    total, allowed = sum(asked.values()), budget_bytes() + FILE_SHARE * file_bytes
    if total <= allowed:
        return
    largest = sorted(asked, key=lambda name: -asked[name])[:3]
    parts = ", ".join(f"{_readable(asked[name])} for {name}" for name in largest if asked[name])
    needed = (total - FILE_SHARE * file_bytes) * 21 // 20  # margin for sizes not known in advance
    raise MemoryBudgetError(
        f"the file asks for {_readable(total)} of memory ({parts}), the budget is {_readable(allowed)}; if "
        f"you trust the file, raise the budget with {VARIABLE}={needed} or "
        f"rlxf.training.memory_budget({needed})"
    )


def _readable(size: int) -> str:
    """``"1.9 GB"``, in powers of 1000."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} bytes"
