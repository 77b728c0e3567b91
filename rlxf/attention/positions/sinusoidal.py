"""Sinusoidal absolute positions: fixed sines and cosines added to the embeddings."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.positions.base import Position, PositionEmbedding
from rlxf.attention.technique import SpecView
from rlxf.attention.validation import check_finite_number


def frequencies(width: int, base: float, device: torch.device | None = None) -> Tensor:
    """Return ``base^(-2m / width)`` for m = 0 ... width / 2 - 1, float64."""
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    return base**-exponent


def check_base(technique: str, base: float) -> None:
    """Raise TypeError or ValueError unless ``base`` can be the base of `frequencies`."""
    check_finite_number(f"{technique} base", base)
    if base <= 1:
        raise ValueError(f"{technique} base must be above 1, got {base}")


def check_even_width(position: Position, choices: SpecView) -> None:
    """Raise ValueError if the width is odd: the position has a sine and a cosine for each frequency."""
    if choices.width % 2:
        raise ValueError(f"{type(position).__name__} needs an even width, got {choices.width}")


@dataclass(frozen=True)
class Sinusoidal(Position):
    r"""``x_t += p_t``, ``p_t[2m] = sin(t * base^(-2m/d))``, ``p_t[2m+1] = cos(t * base^(-2m/d))``.

    Positions count from 0 and have no upper bound. Sine and cosine alternate, as in the paper; tensor2tensor
    and fairseq put the sines first and use other frequencies.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    Args:
        base: longest wavelength over 2 pi, in tokens; above 1.

    Raises:
        ValueError: if base is not above 1 or not finite; in a spec, if the width is odd.
    """

    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762"
    base: float = 10000.0

    def __post_init__(self) -> None:
        check_base("Sinusoidal", self.base)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError if the width is odd."""
        check_even_width(self, choices)

    def build_embedding(self, width: int, heads: int) -> "SinusoidalEmbedding":
        return SinusoidalEmbedding(self)

    def encode(self, position: Tensor, width: int) -> Tensor:
        """Return the encoding (..., width) of position (...), float64."""
        angle = position[..., None] * frequencies(width, self.base, position.device)
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


class SinusoidalEmbedding(PositionEmbedding):
    """Module of `Sinusoidal`."""

    def __init__(self, spec: Sinusoidal):
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x + self.spec.encode(position, x.shape[-1]).to(x.dtype)
