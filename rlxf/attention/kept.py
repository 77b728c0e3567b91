"""Memoization with a least-recently-used cache of bounded size in bytes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Kept(Generic[Result]):
    """Memoized function with a least-recently-used cache. Calls are thread-safe.

    Args:
        make: the function; its arguments must be hashable.
        most: maximum total size of the cached results, in bytes.
        size: function that returns the size of a result, in bytes.
    """

    def __init__(self, make: Callable[..., Result], most: int, size: Callable[[Result], int]):
        self.make, self.most, self.size = make, most, size
        self.held = 0
        self._results: OrderedDict[tuple[Hashable, ...], Result] = OrderedDict()
        self._lock = Lock()

    def __call__(self, *args: Hashable) -> Result:
        """Return the cached result, or compute and cache it."""
        with self._lock:
            if args in self._results:
                self._results.move_to_end(args)
                return self._results[args]
        result = self.make(*args)
        with self._lock:
            self._insert(args, result)
        return result

    def _insert(self, args: tuple[Hashable, ...], result: Result) -> None:
        if args not in self._results:
            self.held += self.size(result)
        self._results[args] = result
        while self.held > self.most:
            _, oldest = self._results.popitem(last=False)
            self.held -= self.size(oldest)


def kept(most: int, size: Callable[[Result], int]) -> Callable[[Callable[..., Result]], Kept[Result]]:
    """Return a decorator that caches up to ``most`` bytes of results; see `Kept`."""
    return lambda make: Kept(make, most, size)
