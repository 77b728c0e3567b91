"""What every position technique offers, and the modules that they build."""

from typing import ClassVar

from torch import Tensor, nn

from rlxf.attention.kernels.base import LayerKernel, PairwiseKernel
from rlxf.attention.relation import Relation
from rlxf.attention.technique import Choices, Technique


class Embedding(nn.Module):
    """How order enters once for all layers: at the bottom of the stack, or in the scores of each.

    This one: not at all. A technique overrides what it needs.
    """

    dearer_gathered: ClassVar[float] = 1.0
    """What a pair costs where keys are gathered, over what it costs where all pairs are computed."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """x (B, T, C), position (B, T) int64 -> (B, T, C)."""
        return x

    def signal(self, x: Tensor, position: Tensor, number: int) -> Tensor | None:
        """What is added to x (B, T, C) before a pass, counted from 0: of that shape, or None for nothing."""
        return None

    def table(self, distances: Tensor, causal: bool) -> Tensor | None:
        """What all layers share and no token changes: computed once a pass, or once for many steps."""
        return None

    def bias(self, relation: Relation) -> Tensor | None:
        """What is added to the scores of every layer, (B or 1, H, Tq, Tk); ``relation.table`` is `table`."""
        return None


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

    def table(self, distances: Tensor, shared: Tensor | None) -> Tensor | None:
        """What depends on distances (R,) alone: computed once a pass, or once for many steps.

        ``shared`` is what `Embedding.table` gave for all layers.
        """
        return None

    def bias(self, q: Tensor, k: Tensor, relation: Relation, table: Tensor | None) -> Tensor | None:
        """What is added to the scores: by default what all layers add.

        q (B, H, Tq, D) before `query`, k (B, H, Tk, D) behind `key` -> (B or 1, H, Tq, Tk) or None.
        """
        return relation.bias

    def average(
        self,
        kernel: LayerKernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        relation: Relation,
        table: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """The kernel's average of v (B, H, Tk, D) -> (B, H, Tq, D), for values that depend on distance."""
        mixed: Tensor = kernel(q, k, v, bias, relation, dropout)
        return mixed


class Position(Technique):
    """Base of the position techniques: frozen dataclasses that build the two modules.

    As every technique, they say for people whose causal form it is, the paper's or ours, and what they
    cost in the length L beside what is there anyway.
    """

    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L"

    @property
    def max_positions(self) -> int | None:
        """Number of positions, in tokens, from 0; None if unlimited."""
        return None

    def build_embedding(self, width: int, heads: int) -> Embedding:
        """The module that all layers share."""
        return Embedding()

    def build(self, width: int, heads: int) -> LayerPosition:
        """The module in the attention of one layer."""
        return LayerPosition()


class PairwisePosition(Position):
    """Base of those that change the score or the value of each pair of tokens by itself.

    They need a kernel that computes each pair: a `PairwiseKernel`.
    """

    cost: ClassVar[str] = "pairs seen"

    def check(self, choices: Choices) -> None:
        """See `Position`."""
        if not isinstance(choices.kernel, PairwiseKernel):
            raise ValueError(
                f"{self} changes the weight of each pair of tokens, and {choices.kernel} computes none; "
                f"choose another position or kernel"
            )
