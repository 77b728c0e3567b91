"""Learned absolute positions: one vector for each position, added to the token or multiplied by it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.positions.base import LearnedPosition, PositionEmbedding
from rlxf.attention.technique import SpecView


@dataclass(frozen=True)
class LearnedAbsolute(LearnedPosition):
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

    def check_without_attention(self) -> None:
        """Do nothing: the position is added to the tokens."""

    def build_embedding(self, width: int, heads: int) -> "LearnedEmbedding":
        return LearnedEmbedding(self, width)


class LearnedEmbedding(PositionEmbedding):
    """Learned table p (max_length, C) of a `LearnedAbsolute`."""

    def __init__(self, spec: LearnedPosition, width: int):
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.randn(spec.max_length, width) * 0.02)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x + self.vectors(position)

    def vectors(self, position: Tensor) -> Tensor:
        """Return the vector of each position (B, T): (B, T, C)."""
        self.spec.check_positions(position)
        return nn.functional.embedding(position, self.weight)


@dataclass(frozen=True)
class Multiplicative(LearnedPosition):
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

    def check_without_attention(self) -> None:
        """Do nothing: tokens are multiplied by the position vectors."""

    def build_embedding(self, width: int, heads: int) -> "MultiplicativeEmbedding":
        return MultiplicativeEmbedding(self, width)


class MultiplicativeEmbedding(LearnedEmbedding):
    """Learned table p (max_length, C) of a `Multiplicative`."""

    def __init__(self, spec: Multiplicative, width: int):
        super().__init__(spec, width)
        self.weight = nn.Parameter(1 + self.weight.detach())

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """Multiply x (B, T, C) by the factors of position (B, T)."""
        return x * self.vectors(position)


@dataclass(frozen=True)
class LearnedPerLayer(LearnedPosition):
    """``h_t += p_l[t]`` before each pass through layer l, with p_l learned.

    The position then does not have to survive all lower layers. Passes that share a layer share its vectors.

    Source: Al-Rfou et al. 2019, arXiv:1808.04444, section "Positional Embeddings".

    Args:
        max_length: number of positions, in tokens. An episode must not be longer.

    Raises:
        TypeError: if max_length is not an integer.
        ValueError: if max_length is less than 1; in a pass, if a position has no vector.
    """

    paper: ClassVar[str] = "Al-Rfou et al. 2019, arXiv:1808.04444"
    max_length: int = 1024

    def check_without_attention(self) -> None:
        """Do nothing: the position is added to the tokens."""

    def build_embedding(self, width: int, heads: int) -> "PerLayerEmbedding":
        """Return the module of a transformer with one layer."""
        return PerLayerEmbedding(self, width, [0])

    def build_shared(self, choices: SpecView) -> "PerLayerEmbedding":
        layer_of_pass = [choices.depth.layer_of_pass(number) for number in range(choices.layers)]
        return PerLayerEmbedding(self, choices.width, layer_of_pass)


class PerLayerEmbedding(PositionEmbedding):
    """Learned tables p (layers, max_length, C) of a `LearnedPerLayer`.

    Args:
        spec: options.
        width: features of a token C.
        layer_of_pass: layer of each pass.
    """

    def __init__(self, spec: LearnedPerLayer, width: int, layer_of_pass: Sequence[int]):
        super().__init__()
        self.spec, self.layer_of_pass = spec, layer_of_pass
        self.weight = nn.Parameter(torch.randn(1 + max(layer_of_pass), spec.max_length, width) * 0.02)

    def pass_embedding(self, x: Tensor, position: Tensor, pass_index: int) -> Tensor:
        self.spec.check_positions(position)
        return nn.functional.embedding(position, self.weight[self.layer_of_pass[pass_index]])
