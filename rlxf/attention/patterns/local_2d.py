"""Image Transformer's local attention over an image: rectangles see themselves and what is around them."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlxf.attention.checks import check_whole
from rlxf.attention.patterns.base import GROUP, Pattern, between


@dataclass(frozen=True)
class Local2D(Pattern):
    """Queries see their rectangle, ``margin_rows`` above and below it and ``margin_columns`` beside it.

    Positions count pixels in the order in which the paper generates them: rectangle by rectangle from left to
    right and from top to bottom, row by row inside. In a causal transformer that is the paper's masked
    form: of the rectangle what came before, and of its surroundings what stands above, also to the right,
    and to the left, also beside later rows. For tokens in another order, give each the position it has here.

    Source: Parmar et al. 2018, arXiv:1802.05751, section 3.2, 2D local attention. There is no scale
    1/sqrt(D) in the authors' code; ours is the kernel's.

    Args:
        width: pixels in a row of the image; as many rows as there are tokens for.
        rows: rows of a rectangle.
        columns: columns of a rectangle; must divide the width.
        margin_rows: rows above and below it that are seen.
        margin_columns: columns beside it that are seen.

    Raises:
        TypeError: if one of them is no whole number.
        ValueError: if a size is less than 1, a margin less than 0, or columns do not divide the width.
    """

    paper: ClassVar[str] = "Parmar et al. 2018, arXiv:1802.05751"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L (rectangle + margins) pairs"
    width: int = 32
    rows: int = 8
    columns: int = 8
    margin_rows: int = 4
    margin_columns: int = 4

    def __post_init__(self) -> None:
        for name in ("width", "rows", "columns"):
            check_whole(f"Local2D {name}", getattr(self, name))
        for name in ("margin_rows", "margin_columns"):
            check_whole(f"Local2D {name}", getattr(self, name), least=0)
        if self.width % self.columns:
            raise ValueError(f"Local2D columns must divide width, got {self.columns} and {self.width}")

    @property
    def reach(self) -> int:
        """From the first pixel of a rectangle to the last one seen below it, on the right."""
        size, across = self.rows * self.columns, self.width // self.columns
        down, right = -(-self.margin_rows // self.rows), -(-self.margin_columns // self.columns)
        row, column = self._last(down, self.margin_rows, self.rows), self.columns - 1
        if right < across:
            column = self._last(right, self.margin_columns, self.columns)
        rectangle = down * across + min(right, across - 1)
        return rectangle * size + row * self.columns + column

    @staticmethod
    def _last(blocks: int, margin: int, size: int) -> int:
        """Where in its rectangle the margin ends, so many rectangles farther on."""
        return size - 1 if blocks == 0 else margin - (blocks - 1) * size - 1

    def allows(self, i: Tensor, j: Tensor) -> Tensor:
        """See above."""
        top, left = self._corner(i)
        row, column = self._pixel(j)
        vertical = (row >= top - self.margin_rows) & (row < top + self.rows + self.margin_rows)
        beside = (column >= left - self.margin_columns) & (column < left + self.columns + self.margin_columns)
        return vertical & beside

    def group(self, i: Tensor) -> Tensor:
        """Rectangles, cut if they are large."""
        size = self.rows * self.columns
        return i.div(size, rounding_mode="floor") * size + i % size // GROUP

    def keys(self, i: Tensor, among: Tensor) -> Tensor:
        """See `Pattern`."""
        return super().keys(i, between(int(i.min()) - self.reach, int(i.max()) + self.reach, among))

    def _corner(self, i: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column of the first pixel of the rectangle."""
        rectangle = i.div(self.rows * self.columns, rounding_mode="floor")
        across = self.width // self.columns
        return rectangle.div(across, rounding_mode="floor") * self.rows, rectangle % across * self.columns

    def _pixel(self, i: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column of a pixel."""
        top, left = self._corner(i)
        inside = i % (self.rows * self.columns)
        return top + inside.div(self.columns, rounding_mode="floor"), left + inside % self.columns
