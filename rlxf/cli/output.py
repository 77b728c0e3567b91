"""Console output of the commands: text and tables, warnings, and errors in one line."""

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import gymnasium
from rich import get_console
from rich.console import Console
from rich.live import Live
from rich.table import Table

from rlxf import exit_on_interrupt
from rlxf.utils.errors import FaultyEnvironmentError
from rlxf.utils.signals import SIGNALS, ReceivedSignal, raise_on_signal, signal_handler
from rlxf.utils.tables import printable

CLOSED_PIPE = 128 + 13
"""Exit status that shells report for a program that was ended by SIGPIPE."""


def silence_output() -> NoReturn:
    """Exit after the standard output was closed by its reader, and discard further output."""
    with open(os.devnull, "wb") as devnull:
        os.dup2(devnull.fileno(), sys.stdout.fileno())
    sys.exit(CLOSED_PIPE)


class PipeSafeConsole(Console):
    """Console of rich that exits with `CLOSED_PIPE` on a closed pipe, where rich exits with 1."""

    def on_broken_pipe(self) -> None:
        """Call `silence_output`."""
        silence_output()


_blocks: list[Live] = []
"""Block at the bottom of the terminal that is redrawn in place, if there is one."""


@contextmanager
def live_block() -> Iterator[Live]:
    """Show a block that is redrawn in place; `print_out` prints above it."""
    with Live(console=console(), auto_refresh=False) as live:
        _blocks.append(live)
        try:
            yield live
        finally:
            _blocks.clear()


def end_blocks() -> None:
    """Draw the `live_block` a last time, so that later output stands below it."""
    for live in _blocks:
        live.stop()
    _blocks.clear()


def console(stderr: bool = False) -> Console:
    """Return the console for output; it prints above a `live_block` on the same terminal."""
    if _blocks and (sys.stderr.isatty() or not stderr):
        return _blocks[-1].console
    return PipeSafeConsole(markup=False, highlight=False, emoji=False, stderr=stderr)


def print_out(content: str | Table) -> None:
    """Print a text or a table. Text is not wrapped, so that paths in it can be copied."""
    console().print(content, soft_wrap=isinstance(content, str))


PREPARATION_ERRORS = (ValueError, TypeError, OSError, ImportError, NotImplementedError, gymnasium.error.Error)
"""Errors reported in one line while options are checked and objects built: the user gave invalid options."""
EXECUTION_ERRORS = (FaultyEnvironmentError, OSError, gymnasium.error.DependencyNotInstalled)
"""Errors reported in one line later: those with an external cause, e.g. NaN observations, a full disk, or a
package that an environment needs for its images."""
EXIT_SIGNALS = tuple(each for each in SIGNALS if each != signal.SIGINT)
"""Signals that end any command, in addition to Ctrl-C."""


def replace_unprintable_characters() -> None:
    """Print "?" for a character that the encoding of an output lacks, in place of an error after training."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")


@contextmanager
def report_errors(*errors: type[Exception]) -> Iterator[None]:
    """Report these errors in one line and exit with status 2."""
    try:
        yield
    except BrokenPipeError:
        raise
    except errors as error:
        exit_with(str(error), 2)


@contextmanager
def exit_in_one_line() -> Iterator[None]:
    """Exit with one line after a signal and without a message on a closed pipe; print warnings in one line.

    The errors of `report_errors` are not included.
    """
    with _exit_on_closed_pipe(), _print_warnings_once(), _silence_thread_errors(), _exit_on_signals():
        yield


@contextmanager
def _exit_on_closed_pipe() -> Iterator[None]:
    """Exit with status 141 when the standard output is a closed pipe, as in ``yes | head``.

    A training that prints ends, too, and its progress is saved.
    """
    # Progress bars of other packages use rich's global console.
    get_console().on_broken_pipe = silence_output  # type: ignore[method-assign]
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # otherwise Python reports a closed pipe when it exits
    except BrokenPipeError:
        silence_output()


@contextmanager
def _print_warnings_once() -> Iterator[None]:
    """Print each `UserWarning` in one line, and once. Other warnings are printed by Python as usual."""
    printed: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if category is not UserWarning:
            default(message, category, *args, **kwargs)
        elif str(message) not in printed:
            printed.add(str(message))
            _print_line(f"warning: {message}", "yellow")

    with warnings.catch_warnings():
        default, warnings.showwarning = warnings.showwarning, show
        yield


@contextmanager
def _silence_thread_errors() -> Iterator[None]:
    """Suppress the traceback of an `OSError` in a thread, because the main thread raises it again."""
    default_hook = threading.excepthook
    threading.excepthook = lambda args: None if isinstance(args.exc_value, OSError) else default_hook(args)
    try:
        yield
    finally:
        threading.excepthook = default_hook


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Exit with status 128 + n after signal n of `EXIT_SIGNALS`, with the same cleanup as after an error.

    The status is 130 after Ctrl-C. Signal handlers can be set in the main thread only; in other threads
    nothing is changed.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is exit_on_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with signal_handler(raise_on_signal, EXIT_SIGNALS):
        try:
            yield
        except KeyboardInterrupt:
            exit_with("interrupted", 130)
        except ReceivedSignal as ended:
            exit_with(f"stopped by {ended.signal.name}", 128 + ended.signal)


def exit_with(message: str, status: int) -> NoReturn:
    """Print the message as one red line, below a block that is redrawn in place, and exit."""
    end_blocks()
    _print_line(message, "red")
    sys.exit(status)


def _print_line(message: str, style: str) -> None:
    line = printable(" ".join(f"rlxf: {message}".split()))
    console(stderr=True).print(line, style=style, soft_wrap=True)
