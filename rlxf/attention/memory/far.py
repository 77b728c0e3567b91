"""Mask of the far tokens that kNN attention may retrieve."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from torch import Tensor

from rlxf.attention.index import EMPTY, Index
from rlxf.attention.relation import Relation

if TYPE_CHECKING:
    from rlxf.attention.memory.knn import KNN


@dataclass(frozen=True, eq=False, kw_only=True)
class FarRelation(Relation):
    """`Relation` with an additional mask over far tokens.

    Args:
        memory: memory technique, which defines the far tokens.
        far: index of the candidate far tokens, (B, F).
        slot: slot of the current token among them, for acting.
    """

    memory: "KNN"
    far: Index
    slot: int = 0

    @classmethod
    def among(
        cls, relations: Sequence[Relation], number: int, memory: "KNN", far: Index, slot: int = 0
    ) -> list[Relation]:
        """Return the relations of all passes, with the far tokens added in pass ``number``."""
        local = {field.name: getattr(relations[number], field.name) for field in fields(Relation)}
        extended = cls(**local, memory=memory, far=far, slot=slot)
        return [*relations[:number], extended, *relations[number + 1 :]]

    def findable(self, queries: slice = slice(None)) -> Tensor:
        """Return the mask over far tokens, (B, Tq, F) bool, for the selected queries."""
        query = self.query.at(queries)
        i, j = query.position[:, :, None], self.far.position[:, None, :]
        same = query.episode[:, :, None] == self.far.episode[:, None, :]
        return same & (self.far.episode != EMPTY)[:, None, :] & self.memory.shows_far(i, j)
