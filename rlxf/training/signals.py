"""Signal handling: a signal requests a stop of training at the next moment from which it can be resumed."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

EXIT_RESUMABLE = 75
"""Exit status of an interrupted run that can be resumed: EX_TEMPFAIL of sysexits.h."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Handled signals: Ctrl-C; ``kill`` and most schedulers; Slurm shortly before the time limit."""


class Interrupted(BaseException):
    """Raised if a signal interrupts work that can be repeated.

    Args:
        by: the signal.
    """

    def __init__(self, by: signal.Signals):
        super().__init__(by.name)
        self.by = by


@dataclass(eq=False)
class StopRequest:
    """Stop request.

    Args:
        by: the signal that requested the stop; None without a request.
    """

    by: signal.Signals | None = None

    def handle_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Record a stop request (signal handler), and restore the default handler of SIGINT."""
        self.by = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Convert SIGINT, SIGTERM and SIGUSR1 to stop requests in this context; then Ctrl-C raises as usual.

    Python runs signal handlers in the main thread. In another thread, this context has no effect.
    """
    stop = StopRequest()
    with signal_handler(stop.handle_signal):
        yield stop


def raise_interrupted(number: int, frame: FrameType | None = None) -> None:
    """Raise `Interrupted`; signal handler for work that can be interrupted at any moment and repeated.

    Raises:
        Stopped: always.
    """
    raise Interrupted(signal.Signals(number))


@contextmanager
def signal_handler(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for `SIGNALS` in this context, and restore the previous handlers at the end.

    Python runs signal handlers in the main thread. In another thread, this context has no effect.
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
