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

from rlxf.cli.screen import console, silence_output
from rlxf.envs.errors import FaultyEnvironmentError

BUILDING = (ValueError, TypeError, OSError, ImportError, NotImplementedError, gymnasium.error.Error)
"""Errors reported in one line while options are checked and objects built: the user gave invalid options."""
WORKING = (FaultyEnvironmentError, OSError)
"""Errors reported in one line later: those with an external cause, e.g. NaN observations or a full disk."""

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that end any command, next to Ctrl-C."""


@contextmanager
def in_one_line(*mistakes: type[Exception]) -> Iterator[None]:
    """Report these errors in one line and exit with status 2; exit with 130 on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        leave("interrupted", 130)
    except BrokenPipeError:
        raise
    except mistakes as error:
        leave(str(error), 2)


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print each `UserWarning` in one line, and once. Other warnings are printed by Python as usual."""
    with warnings.catch_warnings():
        warnings.showwarning = _WarningPrinter(warnings.showwarning)
        yield


@contextmanager
def closed_pipe_ends_quietly() -> Iterator[None]:
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
def disk_errors_told_once() -> Iterator[None]:
    """Suppress the traceback of an `OSError` in a thread, because the main thread raises it again."""
    default_hook = threading.excepthook
    threading.excepthook = lambda args: None if isinstance(args.exc_value, OSError) else default_hook(args)
    try:
        yield
    finally:
        threading.excepthook = default_hook


class Ended(BaseException):
    """Raised when a signal ends the command."""


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Exit with status 128 + n after signal n of `ENDING`, with the same cleanup as after an error.

    Signal handlers can be set in the main thread only; in other threads nothing is changed.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                handler = signal.signal(number, _end)
                stack.callback(signal.signal, number, signal.SIG_DFL if handler is None else handler)
        try:
            yield
        except Ended as ended:
            received = signal.Signals(ended.args[0])
            leave(f"stopped by {received.name}", 128 + received)


def leave(message: str, status: int) -> NoReturn:
    """Print the message as one red line and exit."""
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
