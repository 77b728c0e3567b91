"""Signals that stop a run: their handlers, requests to stop, and the exception that carries a signal."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from signal import Signals
from types import FrameType
from typing import Any, NoReturn

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Handled signals: Ctrl-C; ``kill`` and most schedulers; Slurm shortly before the time limit."""


class ReceivedSignal(BaseException):
    """Raised when a signal ends the program, or interrupts work that can be repeated.

    Args:
        signal: the signal.
    """

    def __init__(self, signal: Signals):
        super().__init__(signal.name)
        self.signal = signal


def raise_on_signal(number: int, frame: FrameType | None = None) -> NoReturn:
    """Raise `ReceivedSignal`; signal handler for work that can be interrupted at any moment.

    Raises:
        ReceivedSignal: always.
    """
    raise ReceivedSignal(Signals(number))


def set_handler(handler: Any) -> None:
    """Set the handler of all `SIGNALS`: a function, ``signal.SIG_IGN`` or ``signal.SIG_DFL``."""
    for each in SIGNALS:
        signal.signal(each, handler)


@contextmanager
def signal_handler(
    handler: Callable[[int, FrameType | None], None], signals: Sequence[Signals] = SIGNALS
) -> Iterator[None]:
    """Install a handler for ``signals`` in this context, and restore the previous handlers at the end.

    Python runs signal handlers in the main thread. In another thread, this context has no effect.
    """
    before = {}
    with suppress(ValueError):  # not in the main thread
        for each in signals:
            before[each] = signal.signal(each, handler)
    try:
        yield
    finally:
        for each, previous in before.items():
            signal.signal(each, signal.SIG_DFL if previous is None else previous)


@dataclass(eq=False)
class StopRequest:
    """Stop request.

    Args:
        signal: the signal that requested the stop; None without a request.
    """

    signal: Signals | None = None

    def check(self) -> None:
        """Raise `ReceivedSignal` if a stop was requested, to end work that a resumed training repeats."""
        if self.signal is not None:
            raise ReceivedSignal(self.signal)

    def handle_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Record a stop request (signal handler), and restore the default handler of SIGINT."""
        self.signal = Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Convert SIGINT, SIGTERM and SIGUSR1 to stop requests in this context; then Ctrl-C raises as usual.

    Python runs signal handlers in the main thread. In another thread, this context has no effect.
    """
    stop = StopRequest()
    with signal_handler(stop.handle_signal):
        yield stop
