"""``rlxf techniques``: what a transformer can be made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
            told = (summary(technique), facts(axis, technique), technique.paper)
            table.add_row(repr(technique()), "\n".join(told))
        show(table)


def facts(axis: str, technique: type[Any]) -> str:
    """Whose the causal form is, what the technique costs for L tokens, and whether it goes with memory."""
    memory = with_memory(axis, technique())
    return f"causal form: {technique.causal}; cost: {technique.cost}; with memory: {memory}"


def with_memory(axis: str, technique: Any) -> str:
    """Whether a transformer with that technique and a memory can be built: yes or no."""
    from rlxf.attention import XL, TransformerSpec

    try:
        TransformerSpec(**{"memory": XL(), axis: technique}).build()
    except ValueError:
        return "no"
    return "yes"
