"""Permissions of the files and folders that are written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

OTHERS_MAY_WRITE = 0o022
"""The bits of a mode that let the group and all others write."""


class _Umask:
    """The umask of the process, tightened while at least one thread needs it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._before = 0

    def tighten(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = os.umask(OTHERS_MAY_WRITE)
                os.umask(self._before | OTHERS_MAY_WRITE)
            self._users += 1

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                os.umask(self._before)


_UMASK = _Umask()


@contextmanager
def not_writable_by_others() -> Iterator[None]:
    """Make new files at most 0o644 and new folders at most 0o755 within this context, whatever the umask is.

    The umask belongs to the process, so files that other threads create meanwhile get no more either. Works
    as a decorator, too.
    """
    _UMASK.tighten()
    try:
        yield
    finally:
        _UMASK.restore()


@not_writable_by_others()
def make_folder(path: Path, exist_ok: bool = False) -> None:
    """Make a folder with its parents, which group and others may not write into.

    Args:
        path: the folder.
        exist_ok: whether it may exist; its permissions stay then.

    Raises:
        OSError: if it cannot be made.
    """
    path.mkdir(parents=True, exist_ok=exist_ok)
