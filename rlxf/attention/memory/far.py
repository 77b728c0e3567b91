"""Tokens far back, and who may find them."""

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
    """A `Relation` to keys that are near, and to tokens that may be far.

    Args:
        memory: says what is far.
        far: where those tokens stand, (B, F).
        slot: while acting, where the token that asks goes among them.
    """

    memory: "KNN"
    far: Index
    slot: int = 0

    @classmethod
    def among(
        cls, relations: Sequence[Relation], number: int, memory: "KNN", far: Index, slot: int = 0
    ) -> list[Relation]:
        """The relations of all passes, but that pass ``number`` may find what is far."""
        near = {field.name: getattr(relations[number], field.name) for field in fields(Relation)}
        own = cls(**near, memory=memory, far=far, slot=slot)
        return [*relations[:number], own, *relations[number + 1 :]]

    def findable(self, queries: slice = slice(None)) -> Tensor:
        """(B, Tq, F) bool: which tokens of its episode are far, for some of the queries."""
        query = self.query.at(queries)
        i, j = query.position[:, :, None], self.far.position[:, None, :]
        same = query.episode[:, :, None] == self.far.episode[:, None, :]
        return same & (self.far.episode != EMPTY)[:, None, :] & self.memory.shows_far(i, j)
