"""Learned absolute positions: one vector for each position."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.positions.base import Position, PositionEmbedding
from rlxf.attention.validation import check_int


@dataclass(frozen=True)
class LearnedAbsolute(Position):
    """``x_t += p[t]``, with p learned.

    Source: Gehring et al. 2017, arXiv:1705.03122, section 3.1.

    Args:
        max_length: number of positions, in tokens. An episode must not be longer.

    Raises:
        TypeError: if max_length is not an integer.
        ValueError: if max_length is less than 1; in a pass, if a position has no vector.
    """

    paper: ClassVar[str] = "Gehring et al. 2017, arXiv:1705.03122"
    max_length: int = 1024

    def __post_init__(self) -> None:
        check_int("LearnedAbsolute max_length", self.max_length)

    @property
    def max_positions(self) -> int:
        """Number of vectors."""
        return self.max_length

    def build_embedding(self, width: int, heads: int) -> "LearnedEmbedding":
        return LearnedEmbedding(self, width)


class LearnedEmbedding(PositionEmbedding):
    """Learned table p (max_length, C) of a `LearnedAbsolute`."""

    def __init__(self, spec: LearnedAbsolute, width: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.randn(spec.max_length, width) * 0.02)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        check_positions(self.spec, self.spec.max_length, position)
        return x + nn.functional.embedding(position, self.weight)


def check_positions(spec: Position, max_length: int, position: Tensor, counted: str = "") -> None:
    """Raise ValueError unless each position has one of ``max_length`` vectors.

    ``counted`` is appended to the message: it names what is counted in addition to the tokens of an episode.
    """
    last = int(position.max())
    if last >= max_length:
        raise ValueError(
            f"position {last} has no vector: {spec} has {max_length} positions from 0{counted}; "
            f"raise max_length or choose a relative position"
        )
