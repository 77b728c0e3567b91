"""What a pass sees of a kNN memory: in one layer, far tokens before the near ones."""

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
    """What the tokens of a segment see of a state, and in pass ``number`` of tokens that are far by then.

    Args:
        memory: says what is far.
        number: the pass that finds them.
    """

    memory: "KNN"
    number: int

    @cached_property
    def far(self) -> Index:
        """Where the tokens stand that are far from the last token of the segment, or too far: (B, F)."""
        older = None if self.state is None else self.state.older
        whole = self.key if older is None else older.index.concatenate(self.key)
        return whole.at(slice(0, max(0, whole.shape[1] - self.memory.length - 1)))

    def related(self, relations: Sequence[Relation]) -> Sequence[Relation]:
        """See `Recall`."""
        return FarRelation.among(relations, self.number, self.memory, self.far)

    def tokens(self, number: int, x: Tensor) -> Tensor | None:
        """See `Recall`; in the pass that finds far tokens these come first, (B, F + M, C)."""
        near = super().tokens(number, x)
        if number != self.number:
            return near
        before = [] if near is None else [near]
        older = [] if self.state is None or self.state.older is None else [self.state.older.hidden[0]]
        whole = torch.cat([*older, *before, x.detach()], dim=1)
        return torch.cat([whole[:, : self.far.shape[1]], *before], dim=1)

    def by_token(self, number: int, weights: Tensor) -> Tensor:
        """See `Recall`. What is found before the M tokens that all layers remember is left out."""
        if number != self.number:
            return weights
        far, near = weights.split([self.far.shape[1], self.key.shape[1]], dim=-1)
        older = 0 if self.state is None or self.state.older is None else self.state.older.index.shape[1]
        found = far[..., older:]
        return near + F.pad(found, (0, near.shape[-1] - found.shape[-1]))
