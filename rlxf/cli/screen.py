"""What commands print."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table


def show(content: str | Table) -> None:
    """Print to the screen. Text is not broken into lines: paths in it are there to be copied."""
    Console(markup=False, highlight=False).print(content, soft_wrap=isinstance(content, str))


def as_table(title: str, values: dict[str, Any]) -> Table:
    """Names and JSON values in two columns."""
    table = Table(title=title, show_header=False)
    for name, value in values.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    return table
