"""Image Transformer's local attention: blocks or rectangles of queries attend to themselves and a margin."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlxf.attention.patterns.base import Pattern, group_in_blocks, positions_between, positions_near
from rlxf.utils.checks import check_int


@dataclass(frozen=True)
class Local1D(Pattern):
    """Query i of block ``[s, s + block)`` attends to the keys of ``[s - margin, s + block + margin)``.

    In a causal transformer this is the paper's masked form: the query's block up to the query, and ``margin``
    tokens before the block. Apart from the causal mask, all queries of a block attend to the same range,
    whatever their distance from its borders.

    Source: Parmar et al. 2018, arXiv:1802.05751, section 3.2, 1D local attention. The authors' code has no
    scale 1/sqrt(D); the scale here is the kernel's.

    Args:
        block: number of queries that share their keys, in tokens (the paper's l_q).
        margin: number of keys on either side of the block; in a causal transformer, only before it (the
            paper's l_m).

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if block is less than 1 or margin is less than 0.
    """

    paper: ClassVar[str] = "Parmar et al. 2018, arXiv:1802.05751"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L (block + margin) pairs"
    block: int = 64
    margin: int = 64

    def __post_init__(self) -> None:
        check_int("Local1D block", self.block)
        check_int("Local1D margin", self.margin, least=0)

    @property
    def max_distance(self) -> int:
        """``block - 1 + margin``."""
        return self.block - 1 + self.margin

    @property
    def shift_period(self) -> int:
        """Length of a block."""
        return self.block

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        start = i - i % self.block
        return (j >= start - self.margin) & (j < start + self.block + self.margin)

    def group(self, i: Tensor) -> Tensor:
        return group_in_blocks(i, self.block)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        first, last = int(i.min()), int(i.max())
        start, end = first - first % self.block, last - last % self.block + self.block
        return positions_between(start - self.margin, end + self.margin - 1, positions)


@dataclass(frozen=True)
class Local2D(Pattern):
    """Queries attend to their rectangle and to a margin around it.

    The margin has ``margin_rows`` rows above and below the rectangle, and ``margin_columns`` on its sides.

    Positions count pixels in the order in which the paper generates them: rectangles from left to right and
    from top to bottom, and row by row inside a rectangle. In a causal transformer this is the paper's masked
    form. A query attends to earlier pixels of its rectangle. In the margin it attends to the pixels above,
    including those to the right, and the pixels to the left, including those to the left of later rows. For
    tokens in a different order, give each token its position in this order.

    Source: Parmar et al. 2018, arXiv:1802.05751, section 3.2, 2D local attention. The authors' code has no
    scale 1/sqrt(D); the scale here is the kernel's.

    Args:
        width: pixels in a row of the image; the number of rows is unlimited.
        rows: rows of a rectangle.
        columns: columns of a rectangle; must divide the width.
        margin_rows: number of visible rows above and below the rectangle.
        margin_columns: number of visible columns on either side of the rectangle.

    Raises:
        TypeError: if an option is not an integer.
        ValueError: if a size is less than 1, a margin is less than 0, or columns does not divide the width.
    """

    paper: ClassVar[str] = "Parmar et al. 2018, arXiv:1802.05751"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L (rectangle + margins) pairs"
    width: int = 32
    rows: int = 8
    columns: int = 8
    margin_rows: int = 4
    margin_columns: int = 4

    def __post_init__(self) -> None:
        for name in ("width", "rows", "columns"):
            check_int(f"Local2D {name}", getattr(self, name))
        for name in ("margin_rows", "margin_columns"):
            check_int(f"Local2D {name}", getattr(self, name), least=0)
        if self.width % self.columns:
            raise ValueError(
                f"Local2D columns must divide width, got columns={self.columns} and width={self.width}"
            )

    @property
    def max_distance(self) -> int:
        """Distance from the first pixel of a rectangle to the last visible pixel below it, on the right."""
        size = self.rows * self.columns
        rectangles_per_row = self.width // self.columns
        down, right = -(-self.margin_rows // self.rows), -(-self.margin_columns // self.columns)
        row = self._last(down, self.margin_rows, self.rows)
        column = self.columns - 1
        if right < rectangles_per_row:
            column = self._last(right, self.margin_columns, self.columns)
        rectangle = down * rectangles_per_row + min(right, rectangles_per_row - 1)
        return rectangle * size + row * self.columns + column

    @staticmethod
    def _last(blocks: int, margin: int, size: int) -> int:
        """Return the last row or column of the margin, counted within the rectangle ``blocks`` away."""
        return size - 1 if blocks == 0 else margin - (blocks - 1) * size - 1

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        top, left = self._corner(i)
        row, column = self._pixel(j)
        vertical = (row >= top - self.margin_rows) & (row < top + self.rows + self.margin_rows)
        right = left + self.columns + self.margin_columns
        return vertical & (column >= left - self.margin_columns) & (column < right)

    def group(self, i: Tensor) -> Tensor:
        """Return the rectangle of each position, with large rectangles divided into groups."""
        return group_in_blocks(i, self.rows * self.columns)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        return super().candidate_keys(i, positions_near(i, self.max_distance, positions))

    def _corner(self, i: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column of the first pixel of the rectangle."""
        rectangle = i.div(self.rows * self.columns, rounding_mode="floor")
        rectangles_per_row = self.width // self.columns
        row = rectangle.div(rectangles_per_row, rounding_mode="floor")
        return row * self.rows, rectangle % rectangles_per_row * self.columns

    def _pixel(self, i: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column of a pixel."""
        top, left = self._corner(i)
        inside = i % (self.rows * self.columns)
        return top + inside.div(self.columns, rounding_mode="floor"), left + inside % self.columns
