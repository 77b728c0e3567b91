"""Sparse Transformer's strided attention: the last l tokens, and every l-th token before them."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from rlxf.attention.patterns.base import GROUP_SIZE, Either, Pattern
from rlxf.attention.patterns.window import Window
from rlxf.attention.validation import check_choice, check_int

Combination = Literal["interleaved", "merged", "heads"]
"""Combination of two rules: alternating by layer, both in every head, or alternating by head."""
WindowForm = Literal["code", "text"]


@dataclass(frozen=True)
class Strided(Pattern):
    """Two rules: A1, ``|i - j| < stride``, and A2, ``stride`` divides ``i - j``.

    Together they connect any two tokens in two steps. With ``interleaved`` layers alternate between A1 and
    A2, with ``heads`` heads alternate, and with ``merged`` a query sees the keys of both.

    In the authors' code a query sees ``stride`` keys by A1, including itself; in the text of the paper it
    sees one more (``t = max(0, i - l)``). The published results were computed with the code. The
    bidirectional form is ours: the same rules on both sides.

    Source: Child et al. 2019, arXiv:1904.10509, sections 4.2 and 4.3.

    Args:
        stride: l, in tokens; near the square root of the length L, the cost grows with L^1.5.
        way: how the rules are combined.
        form: extent of A1, as in the "code" or in the "text".

    Raises:
        TypeError: if stride is not an integer.
        ValueError: if stride is less than 1, or way or form is unknown.
    """

    paper: ClassVar[str] = "Child et al. 2019, arXiv:1904.10509"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L (stride + L / stride) pairs"
    stride: int = 32
    way: Combination = "interleaved"
    form: WindowForm = "code"

    def __post_init__(self) -> None:
        check_int("Strided stride", self.stride)
        check_choice("Strided way", self.way, get_args(Combination))
        check_choice("Strided form", self.form, get_args(WindowForm))

    @property
    def rules(self) -> tuple[Pattern, Pattern]:
        """Rules A1 and A2."""
        return Window(self.stride if self.form == "code" else self.stride + 1), Column(self.stride)

    shift_period = 1  # only distances count

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether A1 or A2 allows the pair."""
        return Either(*self.rules).mask_mod(i, j)

    def for_layer(self, layer: int) -> Pattern:
        return self.rules[layer % 2] if self.way == "interleaved" else self

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        return tuple(self.rules[head % 2] for head in range(heads)) if self.way == "heads" else (self,)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        return Either(*self.rules).candidate_keys(i, positions)


@dataclass(frozen=True)
class Column(Pattern):
    """Pattern in which ``stride`` divides ``i - j``: a column of a sequence in rows of ``stride``."""

    stride: int

    shift_period = 1  # only distances count

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % self.stride == 0

    def group(self, i: Tensor) -> Tensor:
        """Return the column of each position, with long columns divided into groups.

        All queries of a column see the same keys.
        """
        return i.div(GROUP_SIZE * self.stride, rounding_mode="floor") * self.stride + i % self.stride

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        return positions[torch.isin(positions % self.stride, (i % self.stride).unique())]
