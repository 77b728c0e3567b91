"""Results that are kept as long as there is room."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Kept(Generic[Result]):
    """A function that is called once for each of its arguments, as long as what it gave is kept.

    Args:
        make: the function.
        most: bytes that are kept; of the results, those used last.
        size: bytes of a result.
    """

    def __init__(self, make: Callable[..., Result], most: int, size: Callable[[Result], int]):
        self.make, self.most, self.size = make, most, size
        self.held = 0
        self._found: OrderedDict[tuple[Hashable, ...], Result] = OrderedDict()
        self._lock = Lock()

    def __call__(self, *given: Hashable) -> Result:
        """What the function gives."""
        with self._lock:
            if given in self._found:
                self._found.move_to_end(given)
                return self._found[given]
        made = self.make(*given)
        with self._lock:
            self._keep(given, made)
        return made

    def _keep(self, given: tuple[Hashable, ...], made: Result) -> None:
        if given not in self._found:
            self.held += self.size(made)
        self._found[given] = made
        while self.held > self.most:
            _, oldest = self._found.popitem(last=False)
            self.held -= self.size(oldest)


def kept(most: int, size: Callable[[Result], int]) -> Callable[[Callable[..., Result]], Kept[Result]]:
    """Keep what a function gives, at most so many bytes of it; see `Kept`."""
    return lambda make: Kept(make, most, size)
