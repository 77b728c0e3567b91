"""Base classes of position techniques, and the modules that they build."""

from typing import ClassVar

from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.base import AttentionKernel, PairwiseKernel
from rlxf.attention.technique import SpecView, Technique


class PositionEmbedding(nn.Module):
    """Part of a position technique that all layers share: input embedding or score bias.

    By default it does nothing. A technique overrides the methods that it needs.
    """

    gather_cost: ClassVar[float] = 1.0
    """Cost of a pair with gathered keys, relative to its cost where all pairs are computed."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """Add the embedding of position (B, T) int64 to x (B, T, C)."""
        return x

    def signal(self, x: Tensor, position: Tensor, number: int) -> Tensor | None:
        """Return the term added to x (B, T, C) before pass ``number``, from 0; None for none."""
        return None

    def table(self, distances: Tensor, causal: bool) -> Tensor | None:
        """Return tensors that all layers share and that do not depend on tokens.

        They are computed once per pass, or once for many acting steps.
        """
        return None

    def bias(self, relation: AttentionMask) -> Tensor | None:
        """Return the bias on the scores of every layer, (B or 1, H, Tq, Tk), or None.

        ``relation.table`` is the result of `table`.
        """
        return None


class LayerPosition(nn.Module):
    """Part of a position technique in the attention of one layer. By default it does nothing.

    A technique overrides the methods that it needs. Keys are cached after `key`, so a key may depend only on
    its own position; terms that depend on the pair belong in `bias`.
    """

    def query(self, q: Tensor, position: Tensor) -> Tensor:
        """Transform queries q (B, H, T, D) at position (B, T) before they are compared with keys."""
        return q

    def key(self, k: Tensor, position: Tensor) -> Tensor:
        """Transform keys k (B, H, T, D) at position (B, T) before they are cached."""
        return k

    def table(self, distances: Tensor, shared: Tensor | None) -> Tensor | None:
        """Return tensors that depend only on distances (R,), or None.

        They are computed once per pass, or once for many acting steps. ``shared`` is the result of
        `PositionEmbedding.table`.
        """
        return None

    def bias(self, q: Tensor, k: Tensor, relation: AttentionMask, table: Tensor | None) -> Tensor | None:
        """Return the bias on the scores: by default the bias that all layers share.

        q (B, H, Tq, D) before `query`, k (B, H, Tk, D) after `key` -> (B or 1, H, Tq, Tk) or None.
        """
        return relation.bias

    def average(
        self,
        kernel: AttentionKernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        relation: AttentionMask,
        table: Tensor | None,
        dropout: float,
    ) -> Tensor:
        """Return the kernel's average of v (B, H, Tk, D): (B, H, Tq, D).

        Overridden by techniques whose values depend on the distance.
        """
        output: Tensor = kernel(q, k, v, bias, relation, dropout)
        return output


class Position(Technique):
    """Base of the position techniques: frozen dataclasses that build the two modules.

    As in every technique, ``causal`` says whether the causal form is the paper's or ours, and ``cost`` is the
    additional cost in the length L.
    """

    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L"

    @property
    def max_positions(self) -> int | None:
        """Number of positions, in tokens, from 0; None if unlimited."""
        return None

    def build_embedding(self, width: int, heads: int) -> PositionEmbedding:
        """Return the module that all layers share."""
        return PositionEmbedding()

    def build(self, width: int, heads: int) -> LayerPosition:
        """Return the module in the attention of one layer."""
        return LayerPosition()


class PairwisePosition(Position):
    """Base of the techniques that change the score or the value of each pair of tokens.

    They require a kernel that computes each pair: a `PairwiseKernel`.
    """

    cost: ClassVar[str] = "pairs seen"

    def check(self, choices: SpecView) -> None:
        """Raise ValueError unless the kernel computes each pair."""
        if not isinstance(choices.kernel, PairwiseKernel):
            raise ValueError(
                f"{self} changes the weight of each pair of tokens, and {choices.kernel} computes no pairs; "
                f"choose another position or kernel"
            )
