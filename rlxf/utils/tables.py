"""Tables that print themselves: in a script, in a terminal and in a notebook."""

from io import StringIO

import rich.table
from rich.console import Console

WIDTH = 1000
"""Columns of the screen that a table is rendered for: wider than any table, so that no cell is broken."""
HTML = "<pre style=\"font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\">{code}</pre>"


class Table(rich.table.Table):
    """A table of rich that ``print``, ``str``, ``rich.print`` and notebooks show in full.

    Arguments and methods are those of ``rich.table.Table``. ``print`` gives it its natural width;
    ``rich.print`` fits it into the terminal.
    """

    def __str__(self) -> str:
        console = _console()
        console.print(self)
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def _repr_html_(self) -> str:
        console = _console()
        console.print(self)
        return console.export_html(inline_styles=True, code_format=HTML)


class Tabular:
    """An object with a ``table`` method: ``rich.print`` and notebooks show that table.

    ``print`` shows it too, unless the class has a ``__str__`` of its own.
    """

    def table(self) -> Table:
        """Return the content as a table, newly made at each call."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> Table:
        return self.table()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _console() -> Console:
    # The height is given too: without it rich takes a "dumb" terminal for one of 80 columns.
    return Console(
        file=StringIO(), record=True, width=WIDTH, height=100, color_system=None, legacy_windows=False
    )
