"""``rlxf techniques``: what a transformer can be made of."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from rlxf.cli.questions import QUESTIONS, summary
from rlxf.cli.screen import show


@dataclass(frozen=True)
class Techniques:
    """List what a transformer can be made of, by the question it answers.

    Example: rlxf techniques
    """

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        return show_techniques


def show_techniques() -> None:
    """Print a table for each question."""
    from rlxf.attention.techniques import TECHNIQUES

    for axis, question in QUESTIONS.items():
        table = Table("technique", "what it does", title=f"{axis}: {question}", expand=True)
        for technique in TECHNIQUES[axis].values():
            table.add_row(repr(technique()), f"{summary(technique)}\n{technique.paper}")
        show(table)
