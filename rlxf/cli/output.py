"""Console output of the commands."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console
from rich.live import Live
from rich.table import Table

CLOSED_PIPE = 128 + 13
"""Exit status that shells report for a program that was ended by SIGPIPE."""


def silence_output() -> NoReturn:
    """Exit after the standard output was closed by its reader, and discard further output."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
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
    with Live(console=PipeSafeConsole(markup=False, highlight=False), auto_refresh=False) as live:
        _blocks.append(live)
        try:
            yield live
        finally:
            _blocks[:] = [block for block in _blocks if block is not live]


def end_blocks() -> None:
    """Draw the `live_block` a last time, so that later output stands below it."""
    for live in _blocks:
        live.stop()
    _blocks.clear()


def console(stderr: bool = False) -> Console:
    """Return the console for output; it prints above a `live_block` on the same terminal."""
    if _blocks and (sys.stderr.isatty() or not stderr):
        return _blocks[-1].console
    return PipeSafeConsole(markup=False, highlight=False, stderr=stderr)


def print_out(content: str | Table) -> None:
    """Print a text or a table. Text is not wrapped, so that paths in it can be copied."""
    console().print(content, soft_wrap=isinstance(content, str))


def as_table(title: str, values: dict[str, Any]) -> Table:
    """Return a table of names and JSON values."""
    table = Table(title=title, show_header=False)
    for name, value in values.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    return table
