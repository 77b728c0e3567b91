"""What the tokens of a pass see of those before them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rlxf.attention.index import Index
from rlxf.attention.memory.state import State
from rlxf.attention.relation import Relation


@dataclass(frozen=True, eq=False)
class Recall:
    """What the tokens of a segment see of a state. This one: each token of it, as it is.

    Args:
        state: what is remembered; None for nothing.
        index: (B, T), where the segment's tokens stand.
    """

    state: State | None
    index: Index

    @property
    def key(self) -> Index:
        """Where all stand that are seen, (B, M + T): those of memory, then the segment's own."""
        return self.index if self.state is None else self.state.index.concatenate(self.index)

    def related(self, relations: Sequence[Relation]) -> Sequence[Relation]:
        """What queries and keys are to one another in each pass, given what index and pattern say of it."""
        return relations

    def tokens(self, number: int, x: Tensor) -> Tensor | None:
        """What pass ``number`` sees before its own tokens x (B, T, C): (B, M, C), without gradient."""
        return None if self.state is None else self.state.hidden[number]

    def by_token(self, number: int, weights: Tensor) -> Tensor:
        """Weights of a pass's keys as those of the tokens in a state and the segment, (B, H, Tq, M + T)."""
        return weights

    @property
    def learns(self) -> bool:
        """Whether it has a `penalty`."""
        return False

    def penalty(self, hidden: Sequence[Tensor]) -> Tensor | None:
        """What is added to the loss, a scalar, given the inputs (B, T, C) of each pass; None for nothing."""
        return None
