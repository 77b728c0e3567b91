"""``rlxf techniques``: what a transformer can be made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from rlxf.cli.questions import CONTEXT_QUESTION, HEAD_QUESTION, QUESTIONS, summary
from rlxf.cli.screen import show


@dataclass(frozen=True)
class Techniques:
    """List what a transformer can be made of, by the question it answers; tell of pairs; draw a pattern.

    Example: rlxf techniques --draw longformer --length 256

    Args:
        draw: A pattern whose mask to write as a PNG: its name, or JSON like {"name": "Window", "size": 9}.
        length: Tokens in the picture.
        output: The picture's file. Without it, the pattern's name, here.
        pairs: Tell which two techniques, with their defaults, do not go together, and why.
    """

    draw: str | None = None
    length: int = 128
    output: Path | None = None
    pairs: bool = False

    def prepare(self) -> Callable[[], None]:
        """See `Command`."""
        if self.pairs:
            from rlxf.cli.technique_pairs import show_pairs

            return show_pairs
        return show_techniques if self.draw is None else picture(self.draw, self.length, self.output)


def picture(text: str, length: int, output: Path | None) -> Callable[[], None]:
    """What writes the picture of a pattern.

    Raises:
        ValueError: if there is no such pattern, or length is less than 1.
    """
    from rlxf.attention.checks import check_whole
    from rlxf.cli.pattern_picture import draw_pattern, read_pattern

    pattern = read_pattern(text)
    check_whole("length", length)
    file = output or Path(f"{type(pattern).__name__}.png")

    def write() -> None:
        draw_pattern(pattern, length, file)
        show(f"{file}: queries from top to bottom, keys from left to right; pale: hidden where causal")

    return write


def show_techniques() -> None:
    """Print a table for each question, and for what reads the outputs of trained agents."""
    from rlxf.agents.contexts import WAYS
    from rlxf.attention.techniques import HEADS, TECHNIQUES

    for axis, question in QUESTIONS.items():
        _show_table(f"{axis}: {question}", TECHNIQUES[axis], partial(facts, axis))
    _show_table(f"head: {HEAD_QUESTION}", HEADS, costs)
    _show_table(f"context: {CONTEXT_QUESTION}", WAYS, costs)


def _show_table(title: str, techniques: Mapping[str, type[Any]], told: Callable[[type[Any]], str]) -> None:
    table = Table("technique", "what it does", title=title, expand=True)
    for technique in techniques.values():
        lines = (summary(technique), told(technique), technique.paper)
        table.add_row(Text(repr(technique())), Text("\n".join(lines)))
    show(table)


def facts(axis: str, technique: type[Any]) -> str:
    """Whose the causal form is, what the technique costs for L tokens, and whether it goes with memory."""
    return f"{costs(technique)}; with memory: {with_memory(axis, technique())}"


def costs(technique: type[Any]) -> str:
    """Whose the causal form is, and what the technique costs."""
    return f"causal form: {technique.causal}; cost: {technique.cost}"


def with_memory(axis: str, technique: Any) -> str:
    """Whether a transformer with that technique and a memory can be built: yes or no."""
    from rlxf.attention import XL, TransformerSpec

    try:
        TransformerSpec(**{"memory": XL(), axis: technique}).build()
    except ValueError:
        return "no"
    return "yes"
