"""A signal asks a training to stop where it can be resumed, in place of ending the process there and then."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

RESUMABLE = 75
"""Exit status of a training that can be resumed: EX_TEMPFAIL of sysexits.h, "try again later"."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Of Ctrl-C, of ``kill`` and most schedulers, and of Slurm shortly before the time is up."""


class Stopped(BaseException):
    """Raised when a signal ends the current work.

    Args:
        by: the signal.
    """

    def __init__(self, by: signal.Signals):
        super().__init__(by.name)
        self.by = by


@dataclass(eq=False)
class Stop:
    """Whether somebody has asked to stop.

    Args:
        by: the signal; None if nobody has.
    """

    by: signal.Signals | None = None

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """Note a signal; the handler of all of them."""
        self.by = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """While it lasts, SIGINT, SIGTERM and SIGUSR1 only ask to stop. After one of them Ctrl-C ends at once.

    Handlers are those of the main thread: elsewhere nothing is asked, and signals do as before.
    """
    stop = Stop()
    with handled(stop.ask):
        yield stop


def raise_stopped(number: int, frame: FrameType | None = None) -> None:
    """Raise `Stopped`: a handler for work that can be repeated, and may end at any moment.

    Raises:
        Stopped: always.
    """
    raise Stopped(signal.Signals(number))


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle `SIGNALS` by a function within this context; restore their previous handlers at the end.

    Python runs handlers in the main thread. In another thread nothing is changed.
    """
    before = {}
    try:
        for each in SIGNALS:
            before[each] = signal.signal(each, handler)
    except ValueError:  # not in the main thread
        pass
    try:
        yield
    finally:
        for each, previous in before.items():
            signal.signal(each, signal.SIG_DFL if previous is None else previous)
