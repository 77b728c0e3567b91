"""View of a kNN memory for a segment: in the kNN layer, far tokens precede the local ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.index import Index
from rlxf.attention.memory.far import FarRelation
from rlxf.attention.memory.recall import Recall
from rlxf.attention.relation import Relation

if TYPE_CHECKING:
    from rlxf.attention.memory.knn import KNN


@dataclass(frozen=True, eq=False)
class KNNRecall(Recall):
    """View of a kNN memory for a segment, with far tokens in pass ``number``.

    Args:
        memory: memory technique, which defines the far tokens.
        number: number of the pass with kNN attention.
    """

    memory: "KNN"
    number: int

    @cached_property
    def far(self) -> Index:
        """Index of the tokens at a distance of more than M slots from the segment's last token, (B, F)."""
        older = None if self.state is None else self.state.older
        tokens = self.key if older is None else older.index.concatenate(self.key)
        return tokens.at(slice(0, max(0, tokens.shape[1] - self.memory.length - 1)))

    def related(self, relations: Sequence[Relation]) -> Sequence[Relation]:
        """See `Recall`."""
        return FarRelation.among(relations, self.number, self.memory, self.far)

    def tokens(self, number: int, x: Tensor) -> Tensor | None:
        """Return the memory tokens of a pass; in the kNN layer far tokens come first, (B, F + M, C)."""
        near = super().tokens(number, x)
        if number != self.number:
            return near
        memory = [] if near is None else [near]
        older = [] if self.state is None or self.state.older is None else [self.state.older.hidden[0]]
        tokens = torch.cat([*older, *memory, x.detach()], dim=1)
        return torch.cat([tokens[:, : self.far.shape[1]], *memory], dim=1)

    def by_token(self, number: int, weights: Tensor) -> Tensor:
        """Convert weights over keys to weights over tokens of state and segment.

        Weights of far tokens before the M tokens that all layers store are dropped.
        """
        if number != self.number:
            return weights
        far, near = weights.split([self.far.shape[1], self.key.shape[1]], dim=-1)
        older = 0 if self.state is None or self.state.older is None else self.state.older.index.shape[1]
        retrieved = far[..., older:]
        return near + F.pad(retrieved, (0, near.shape[-1] - retrieved.shape[-1]))
