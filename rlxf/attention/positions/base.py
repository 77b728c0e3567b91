"""What every position technique offers, and the modules that they build."""

from typing import ClassVar

from torch import Tensor, nn

from rlxf.attention.relation import Relation


class Embedding(nn.Module):
    """How order enters at the bottom of the stack. This one: not at all."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """x (B, T, C), position (B, T) int64 -> (B, T, C)."""
        return x


class LayerPosition(nn.Module):
    """How order enters the attention of one layer. This one: not at all.

    A technique overrides what it needs. Keys are cached after `key`, so a key may depend on its
    own position alone; what depends on the pair belongs in `bias`.
    """

    def query(self, q: Tensor, position: Tensor) -> Tensor:
        """q (B, H, T, D), position (B, T) -> the q that meets the keys."""
        return q

    def key(self, k: Tensor, position: Tensor) -> Tensor:
        """k (B, H, T, D), position (B, T) -> the k that meets the queries."""
        return k

    def table(self, distances: Tensor) -> Tensor | None:
        """What depends on distances (R,) alone: computed once a pass, or once for many steps."""
        return None

    def bias(self, q: Tensor, relation: Relation, table: Tensor | None) -> Tensor | None:
        """What is added to the scores: q (B, H, Tq, D) before `query` -> (B, H, Tq, Tk) or None."""
        return None


class Position:
    """Base of the position techniques: frozen dataclasses that build the two modules."""

    paper: ClassVar[str]

    def build_embedding(self, width: int) -> Embedding:
        """The module at the bottom of the stack."""
        return Embedding()

    def build(self, width: int, heads: int) -> LayerPosition:
        """The module in the attention of one layer."""
        return LayerPosition()
