"""What acting token by token keeps between steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.attention.attention import LayerCache
from rlxf.attention.context import ProjectedContext
from rlxf.attention.index import Index
from rlxf.attention.kernels.base import LayerMemory
from rlxf.attention.relation import Relation, Tables


@dataclass(eq=False)
class Cache:
    """Projected keys and values of the last S tokens, in a ring: a step costs the same at any age.

    A recurrent kernel that sees all of an episode keeps sums over it in their place; S is then 1.
    `Transformer.step` writes into it. To keep an older one, `copy` it first.

    Args:
        layers: one ring a layer, or what a recurrent kernel remembers there.
        index: (B, S), where the token of each slot stands.
        slot: where the next token goes.
        tables: the distances of the layers' tables, and what the layers share.
        context: what cross-attention reads; None without it.
    """

    layers: Sequence[LayerCache | LayerMemory]
    index: Index
    slot: int
    tables: Tables
    context: ProjectedContext | None

    def write(self, index: Index) -> int:
        """Note where the next token (B, 1) stands; returns its slot."""
        slot = self.slot
        self.index.position[:, slot : slot + 1] = index.position
        self.index.episode[:, slot : slot + 1] = index.episode
        self.slot = (slot + 1) % self.index.shape[1]
        return slot

    def related(self, relations: Sequence[Relation]) -> Sequence[Relation]:
        """What a token and the slots are to one another in each pass, given what index and pattern say."""
        return relations

    def enter(self, number: int, x: Tensor) -> None:
        """Hear what the token x (B, 1, C) is as it enters a pass; `write` was told where it stands."""

    def rows(self, rows: Tensor) -> "Cache":
        """A copy of the chosen rows of the batch: ``rows`` is a bool (B,) or an int64 (N,) tensor."""
        rows = rows.nonzero()[:, 0] if rows.dtype is torch.bool else rows
        layers = [layer.rows(rows) for layer in self.layers]
        context = None if self.context is None else self.context.rows(rows)
        return Cache(layers, self.index.rows(rows), self.slot, self.tables, context)

    def copy(self) -> "Cache":
        """A copy of every row."""
        return self.rows(torch.arange(self.index.shape[0], device=self.index.episode.device))
