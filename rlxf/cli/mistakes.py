"""What a user can mend is told in one line; a bug keeps its traceback."""

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
"""While what was asked for is checked and built, these say that it cannot be had."""
WORKING = (FaultyEnvironmentError, OSError)
"""Later, only these come from outside: an environment that gives NaN, a disk that is full."""

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that end any command, next to Ctrl-C."""


@contextmanager
def in_one_line(*mistakes: type[Exception]) -> Iterator[None]:
    """Leave with 2 on a mistake of the user, with 130 on Ctrl-C; anything else passes."""
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
    """Tell each `UserWarning` in one line, once; Python shows all other warnings as ever."""
    with warnings.catch_warnings():
        warnings.showwarning = _Teller(warnings.showwarning)
        yield


@contextmanager
def closed_pipe_ends_quietly() -> Iterator[None]:
    """Leave with status 141, as ``yes | head`` does, after the reader of the standard output has closed it.

    A training that prints there ends, too, and keeps its progress.
    """
    get_console().on_broken_pipe = silence_output  # type: ignore[method-assign]  # of bars of other packages
    try:
        yield
    except BrokenPipeError:
        silence_output()
    finally:
        _flush()


def _flush() -> None:
    """Flush the output now: at the exit of Python a closed pipe would be reported."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence_output()


@contextmanager
def disk_errors_told_once() -> Iterator[None]:
    """A thread that cannot write says nothing: whoever it writes for raises its `OSError` again."""
    before = threading.excepthook
    threading.excepthook = lambda thrown: None if isinstance(thrown.exc_value, OSError) else before(thrown)
    try:
        yield
    finally:
        threading.excepthook = before


class Ended(BaseException):
    """Raised when a signal ends the command."""


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Leave with 128 + n after signal n of `ENDING`: temporary state is cleaned up, as after an error.

    Handlers are those of the main thread: elsewhere nothing is changed.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for each in ENDING:
                before = signal.signal(each, _end)
                stack.callback(signal.signal, each, signal.SIG_DFL if before is None else before)
        try:
            yield
        except Ended as ended:
            number = signal.Signals(ended.args[0])
            leave(f"stopped by {number.name}", 128 + number)


def leave(message: str, status: int) -> NoReturn:
    """End the program with one red line."""
    _tell(message, "red")
    sys.exit(status)


class _Teller:
    """Takes the place of ``warnings.showwarning``."""

    def __init__(self, others: Callable[..., None]):
        self.others = others
        self.told: set[str] = set()

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
            self.others(message, category, filename, lineno, file, line)
        elif text not in self.told:
            self.told.add(text)
            _tell(f"warning: {text}", "yellow")


def _tell(message: str, style: str) -> None:
    line = " ".join(f"rlxf: {message}".split())
    console(stderr=True).print(line, style=style, soft_wrap=True)
