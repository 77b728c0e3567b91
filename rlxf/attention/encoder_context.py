"""Encoder context for cross-attention."""

from dataclasses import dataclass

from torch import Tensor

from rlxf.attention.token_index import TokenIndex


@dataclass(frozen=True, eq=False)
class Context:
    """Tokens that a decoder reads through cross-attention, usually the output of an encoder.

    A query attends to all context tokens of its own episode.

    Args:
        x: context tokens, (B, N, C).
        index: their positions and episodes, (B, N); episode -1 marks padding.
    """

    x: Tensor
    index: TokenIndex


@dataclass(frozen=True, eq=False)
class ProjectedContext:
    """Projected keys and values (B, H, N, D) of a context, one pair per pass."""

    layers: list[tuple[Tensor, ...]]
    index: TokenIndex

    def rows(self, rows: Tensor) -> "ProjectedContext":
        """Return the selected rows of the batch."""
        layers = [tuple(part[rows] for part in layer) for layer in self.layers]
        return ProjectedContext(layers, self.index.rows(rows))
