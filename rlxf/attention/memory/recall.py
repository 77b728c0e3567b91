"""View of a memory state for a segment."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rlxf.attention.index import Index
from rlxf.attention.memory.state import State
from rlxf.attention.relation import Relation


@dataclass(frozen=True, eq=False)
class Recall:
    """View of a memory state for a segment. This base class shows every token of the state unchanged.

    Args:
        state: memory state; None for no memory.
        index: (B, T), positions and episodes of the segment's tokens.
    """

    state: State | None
    index: Index

    @property
    def key(self) -> Index:
        """Index of the keys, (B, M + T): memory first, then the segment."""
        return self.index if self.state is None else self.state.index.concatenate(self.index)

    def related(self, relations: Sequence[Relation]) -> Sequence[Relation]:
        """Return the attention masks of each pass, adapted to this memory.

        Args:
            relations: masks of each pass, as derived from index and pattern.
        """
        return relations

    def tokens(self, number: int, x: Tensor) -> Tensor | None:
        """Return the memory tokens of pass ``number``, (B, M, C), without gradient; None for no memory.

        Args:
            number: number of the pass.
            x: inputs of the pass for the segment, (B, T, C).
        """
        return None if self.state is None else self.state.hidden[number]

    def by_token(self, number: int, weights: Tensor) -> Tensor:
        """Convert weights over the keys of a pass to weights over tokens of state and segment.

        Returns:
            (B, H, Tq, M + T).
        """
        return weights

    @property
    def learns(self) -> bool:
        """Return whether this memory has an auxiliary loss."""
        return False

    def penalty(self, hidden: Sequence[Tensor]) -> Tensor | None:
        """Return the auxiliary loss, a scalar, given the inputs (B, T, C) of each pass; None for none."""
        return None
