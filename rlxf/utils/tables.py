"""Tables with a text and an HTML representation, for scripts, terminals and notebooks, and progress bars."""

from io import StringIO

import rich.table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

WIDTH = 1000
"""Console width for rendering, in characters; wider than any table, so that no cell is wrapped."""
HTML = "<pre style=\"font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\">{code}</pre>"


class Table(rich.table.Table):
    """Subclass of ``rich.table.Table`` with a text form for ``print`` and an HTML form for notebooks.

    Arguments and methods are those of ``rich.table.Table``. ``print`` uses the natural width of the table;
    ``rich.print`` fits the table into the terminal.
    """

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in _printed(self).export_text().splitlines())

    def markdown(self) -> str:
        """Return the table as Markdown below its title, with its caption."""
        columns = [[str(column.header), *map(str, column.cells)] for column in self.columns]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in zip(*columns, strict=True)]
        rows = [f"| {line} |" for line in lines]
        rows.insert(1, "|---" * len(columns) + "|")
        title = [f"{self.title}\n"] * bool(self.title)
        return "\n".join([*title, *rows, *[f"\n{self.caption}"] * bool(self.caption)])

    def _repr_html_(self) -> str:
        return _printed(self).export_html(inline_styles=True, code_format=HTML)


class Tabular:
    """Base class of objects that are displayed as a table, in ``rich.print`` and in notebooks.

    Subclasses implement ``table``. ``print`` shows the table, too, unless the class overrides ``__str__``.
    """

    def table(self) -> Table:
        """Return the content as a new table."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> Table:
        return self.table()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def printable(text: str) -> str:
    """Return a text of a file for the terminal: control characters are escaped as in Python strings."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def counting_bar(enabled: bool) -> Progress:
    """Return a progress bar with the number of completed items, which shows nothing unless it is enabled."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not enabled)


def _printed(table: Table) -> Console:
    # Without a height, rich assumes 80 columns for a "dumb" terminal.
    # Names of a user's runs and environments may contain brackets or colons, so markup is off.
    console = Console(
        file=StringIO(),
        record=True,
        width=WIDTH,
        height=100,
        color_system=None,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(table)
    return console
