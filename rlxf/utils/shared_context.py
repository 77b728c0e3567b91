"""Context managers of settings of the whole process, which several threads may use at the same time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from threading import Lock


class SharedContext(ContextDecorator):
    """Context manager that is entered by the first of its concurrent users, and left by the last.

    Threads that each restore the setting that they found could leave that of another thread behind. The
    context manager also works as a decorator, and may be nested.

    Args:
        create: function that creates the context manager which changes and restores the setting.
    """

    def __init__(self, create: Callable[[], AbstractContextManager[object]]):
        self._create = create
        self._lock = Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._current = self._create()
                self._current.__enter__()
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._current.__exit__(None, None, None)
