"""Permissions of the files and folders that rlxf writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

GROUP_AND_OTHERS_WRITE = 0o022
"""Mode bits that give write permission to group and others."""


class _Umask:
    """Umask of the process, restricted while at least one thread needs it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._before = 0

    def restrict(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = os.umask(GROUP_AND_OTHERS_WRITE)
                os.umask(self._before | GROUP_AND_OTHERS_WRITE)
            self._users += 1

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                os.umask(self._before)


_UMASK = _Umask()


@contextmanager
def not_writable_by_others() -> Iterator[None]:
    """Limit the mode of new files to 0o644 and of new folders to 0o755 in this context, for any umask.

    The umask belongs to the process, so the limit also applies to files that other threads create meanwhile.
    The context manager also works as a decorator.
    """
    _UMASK.restrict()
    try:
        yield
    finally:
        _UMASK.restore()


@not_writable_by_others()
def make_folder(path: Path, exist_ok: bool = False) -> None:
    """Create a folder and its parents, without write permission for group and others.

    Args:
        path: the folder.
        exist_ok: whether the folder may exist; its permissions are then unchanged.

    Raises:
        OSError: if the folder cannot be created.
    """
    path.mkdir(parents=True, exist_ok=exist_ok)
