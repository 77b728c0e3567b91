"""Multiplicative absolute positions: one learned factor for each position and feature."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.positions.base import Position, PositionEmbedding
from rlxf.attention.positions.learned_absolute import check_positions
from rlxf.attention.validation import check_int


@dataclass(frozen=True)
class Multiplicative(Position):
    """``x_t *= p[t]``, feature by feature, with p learned.

    p starts near 1, which leaves tokens almost unchanged; near 0 it would erase them.

    Source: Su 2021, "Transformer position encodings that rack researchers' brains", kexue.fm/archives/8130,
    section on multiplication.

    Args:
        max_length: number of positions, in tokens. An episode must not be longer.

    Raises:
        TypeError: if max_length is not an integer.
        ValueError: if max_length is less than 1; in a pass, if a position has no vector.
    """

    paper: ClassVar[str] = "Su 2021, kexue.fm/archives/8130"
    max_length: int = 1024

    def __post_init__(self) -> None:
        check_int("Multiplicative max_length", self.max_length)

    @property
    def max_positions(self) -> int:
        """Number of vectors."""
        return self.max_length

    def build_embedding(self, width: int, heads: int) -> "MultiplicativeEmbedding":
        return MultiplicativeEmbedding(self, width)


class MultiplicativeEmbedding(PositionEmbedding):
    """Learned table p (max_length, C) of a `Multiplicative`."""

    def __init__(self, spec: Multiplicative, width: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(1 + torch.randn(spec.max_length, width) * 0.02)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """Multiply x (B, T, C) by the factors of position (B, T)."""
        check_positions(self.spec, self.spec.max_length, position)
        return x * nn.functional.embedding(position, self.weight)
