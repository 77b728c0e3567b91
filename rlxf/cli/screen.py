"""What commands print."""

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
"""Exit status that shells report of a program which SIGPIPE has ended."""


def silence_output() -> NoReturn:
    """Leave after the reader of the standard output is gone; further output is discarded."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    sys.exit(CLOSED_PIPE)


class Screen(Console):
    """rich's console; without a reader it leaves with `CLOSED_PIPE`, unlike rich, which leaves with 1."""

    def on_broken_pipe(self) -> None:
        """See `silence_output`."""
        silence_output()


_blocks: list[Live] = []
"""The block at the bottom of the terminal that is redrawn in place, if there is one."""


@contextmanager
def block() -> Iterator[Live]:
    """Show a block that is redrawn in place; output of `show` goes above it."""
    with Live(console=Screen(markup=False, highlight=False), auto_refresh=False) as live:
        _blocks.append(live)
        try:
            yield live
        finally:
            _blocks.remove(live)


def console(stderr: bool = False) -> Console:
    """Return the console for output: above the `block` if there is one on the same terminal."""
    if _blocks and (sys.stderr.isatty() or not stderr):
        return _blocks[-1].console
    return Screen(markup=False, highlight=False, stderr=stderr)


def show(content: str | Table) -> None:
    """Print to the screen. Text is not broken into lines: paths in it are there to be copied."""
    console().print(content, soft_wrap=isinstance(content, str))


def as_table(title: str, values: dict[str, Any]) -> Table:
    """Names and JSON values in two columns."""
    table = Table(title=title, show_header=False)
    for name, value in values.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    return table
