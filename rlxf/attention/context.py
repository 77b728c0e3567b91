"""What a decoder looks at beside its own tokens."""

from dataclasses import dataclass

from torch import Tensor

from rlxf.attention.index import Index


@dataclass(frozen=True, eq=False)
class Context:
    """Tokens for cross-attention, the output of an encoder as a rule.

    A query sees the context tokens of its own episode, all of them.

    Args:
        x: (B, N, C).
        index: (B, N), where they stand; episode -1 for padding.
    """

    x: Tensor
    index: Index


@dataclass(frozen=True, eq=False)
class ProjectedContext:
    """Keys and values (B, H, N, D) of a context, a pair for each layer."""

    layers: list[tuple[Tensor, ...]]
    index: Index

    def rows(self, rows: Tensor) -> "ProjectedContext":
        """The chosen rows of the batch."""
        layers = [tuple(part[rows] for part in layer) for layer in self.layers]
        return ProjectedContext(layers, self.index.rows(rows))
