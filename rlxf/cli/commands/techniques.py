"""``rlxf techniques``: list the techniques of transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlxf.cli.options.common import Count


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
    length: Count = 128
    output: Path | None = None
    pairs: bool = False

    def prepare(self) -> Callable[[], None]:
        """Return the function that prints the list or the pairs, or draws the pattern."""
        from rlxf.attention.validation import check_int
        from rlxf.cli.technique_tables import draw_pattern, read_pattern, show_pairs, show_techniques

        if self.pairs:
            return show_pairs
        if self.draw is None:
            return show_techniques
        pattern = read_pattern(self.draw)
        check_int("length", self.length)
        file = self.output or Path(f"{type(pattern).__name__}.png")
        return partial(draw_pattern, pattern, self.length, file)
