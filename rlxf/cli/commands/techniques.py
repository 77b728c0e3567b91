"""``rlxf techniques``: list the techniques of transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from rlxf.cli.help_text import CONTEXT_QUESTION, HEAD_QUESTION, QUESTIONS, summary
from rlxf.cli.output import print_out


@dataclass(frozen=True)
class Techniques:
    """List the techniques that a transformer can be built from, or draw a sparse attention pattern.

    Example: rlxf techniques --draw longformer --length 256

    Args:
        draw: Pattern whose mask is saved as a PNG: a name, or JSON like {"name": "Window", "size": 9}.
        length: Number of tokens in the image.
        output: File of the image. None means the name of the pattern in the current folder.
        pairs: List the pairs of techniques that are incompatible with default options, with the reasons.
    """

    draw: str | None = None
    length: int = 128
    output: Path | None = None
    pairs: bool = False

    def prepare(self) -> Callable[[], None]:
        """Return the function that prints the list or the pairs, or draws the pattern."""
        if self.pairs:
            from rlxf.cli.technique_tables import show_pairs

            return show_pairs
        return show_techniques if self.draw is None else save_image(self.draw, self.length, self.output)


def save_image(text: str, length: int, output: Path | None) -> Callable[[], None]:
    """Return a function that saves the image of a pattern.

    Raises:
        ValueError: if the pattern does not exist, or length is less than 1.
    """
    from rlxf.attention.validation import check_int
    from rlxf.cli.technique_tables import draw_pattern, read_pattern

    pattern = read_pattern(text)
    check_int("length", length)
    file = output or Path(f"{type(pattern).__name__}.png")

    def write() -> None:
        draw_pattern(pattern, length, file)
        print_out(f"{file}: rows are queries, columns are keys; light: masked in causal transformers")

    return write


def show_techniques() -> None:
    """Print a table for each axis, and for output heads and combinations of contexts."""
    from rlxf.agents.contexts import CONTEXT_MERGERS
    from rlxf.attention.registry import HEADS, TECHNIQUES

    for axis, question in QUESTIONS.items():
        _show_table(f"{axis}: {question}", TECHNIQUES[axis], partial(properties, axis))
    _show_table(f"head: {HEAD_QUESTION}", HEADS, costs)
    _show_table(f"context: {CONTEXT_QUESTION}", CONTEXT_MERGERS, costs)


def _show_table(
    title: str, techniques: Mapping[str, type[Any]], describe: Callable[[type[Any]], str]
) -> None:
    table = Table("technique", "description", title=title, expand=True)
    for technique in techniques.values():
        lines = (summary(technique), describe(technique), technique.paper)
        table.add_row(Text(repr(technique())), Text("\n".join(lines)))
    print_out(table)


def properties(axis: str, technique: type[Any]) -> str:
    """Return origin of the causal form, cost for L tokens, and support of memory as text."""
    return f"{costs(technique)}; with memory: {with_memory(axis, technique())}"


def costs(technique: type[Any]) -> str:
    """Return the origin of the causal form and the cost of a technique as text."""
    return f"causal form: {technique.causal}; cost: {technique.cost}"


def with_memory(axis: str, technique: Any) -> str:
    """Return "yes" if a transformer with this technique and an XL memory can be built, else "no"."""
    from rlxf.attention import XL, TransformerSpec

    try:
        TransformerSpec(**{"memory": XL(), axis: technique}).build()
    except ValueError:
        return "no"
    return "yes"
