"""Error reporting: errors that the user can fix are printed in one line; bugs keep their traceback."""

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import NoReturn, TextIO

import gymnasium
from rich import get_console

from rlxf.cli.output import console, end_blocks, silence_output
from rlxf.utils.errors import FaultyEnvironmentError

PREPARATION_ERRORS = (ValueError, TypeError, OSError, ImportError, NotImplementedError, gymnasium.error.Error)
"""Errors reported in one line while options are checked and objects built: the user gave invalid options."""
EXECUTION_ERRORS = (FaultyEnvironmentError, OSError)
"""Errors reported in one line later: those with an external cause, e.g. NaN observations or a full disk."""

EXIT_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that end any command, next to Ctrl-C."""


@contextmanager
def report_errors(*mistakes: type[Exception]) -> Iterator[None]:
    """Report these errors in one line and exit with status 2; exit with 130 on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        exit_with("interrupted", 130)
    except BrokenPipeError:
        raise
    except mistakes as error:
        exit_with(str(error), 2)


@contextmanager
def print_warnings_once() -> Iterator[None]:
    """Print each `UserWarning` in one line, and once. Other warnings are printed by Python as usual."""
    with warnings.catch_warnings():
        warnings.showwarning = _WarningPrinter(warnings.showwarning)
        yield


@contextmanager
def exit_on_closed_pipe() -> Iterator[None]:
    """Exit with status 141 when the standard output is a closed pipe, as in ``yes | head``.

    A training that prints ends, too, and its progress is saved.
    """
    # Progress bars of other packages use rich's global console.
    get_console().on_broken_pipe = silence_output  # type: ignore[method-assign]
    try:
        yield
    except BrokenPipeError:
        silence_output()
    finally:
        _flush()


def _flush() -> None:
    """Flush the standard output; otherwise Python reports a closed pipe when it exits."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence_output()


@contextmanager
def silence_disk_errors_of_threads() -> Iterator[None]:
    """Suppress the traceback of an `OSError` in a thread, because the main thread raises it again."""
    default_hook = threading.excepthook
    threading.excepthook = lambda args: None if isinstance(args.exc_value, OSError) else default_hook(args)
    try:
        yield
    finally:
        threading.excepthook = default_hook


class ReceivedSignal(BaseException):
    """Raised when a signal ends the command."""


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise ReceivedSignal(number)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit with status 128 + n after signal n of `EXIT_SIGNALS`, with the same cleanup as after an error.

    Signal handlers can be set in the main thread only; in other threads nothing is changed.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_SIGNALS:
                handler = signal.signal(number, _end)
                stack.callback(signal.signal, number, signal.SIG_DFL if handler is None else handler)
        try:
            yield
        except ReceivedSignal as ended:
            received = signal.Signals(ended.args[0])
            exit_with(f"stopped by {received.name}", 128 + received)


def exit_with(message: str, status: int) -> NoReturn:
    """Print the message as one red line, below a block that is redrawn in place, and exit."""
    end_blocks()
    _print_line(message, "red")
    sys.exit(status)


class _WarningPrinter:
    """Replacement of ``warnings.showwarning``, which handles warnings other than `UserWarning`."""

    def __init__(self, default: Callable[..., None]):
        self.default = default
        self.printed: set[str] = set()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = str(message)
        if category is not UserWarning:
            self.default(message, category, filename, lineno, file, line)
        elif text not in self.printed:
            self.printed.add(text)
            _print_line(f"warning: {text}", "yellow")


def _print_line(message: str, style: str) -> None:
    line = " ".join(f"rlxf: {message}".split())
    console(stderr=True).print(line, style=style, soft_wrap=True)
