"""Universal Transformer's two-dimensional signal: sinusoids of the position and of the pass."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.positions.base import Position, PositionEmbedding
from rlxf.attention.positions.sinusoidal import Sinusoidal, check_base, check_even_width
from rlxf.attention.technique import SpecView


@dataclass(frozen=True)
class UniversalSinusoid(Position):
    """``h_t += p_t + p_n`` before each pass n = 1 ... N, with p as in `Sinusoidal` and positions t from 0.

    Source: Dehghani et al. 2019, arXiv:1807.03819, section 2.1, equations 6 and 7.

    Args:
        base: longest wavelength over 2 pi, in tokens; above 1.

    Raises:
        ValueError: if base is not above 1 or not finite; in a spec, if the width is odd.
    """

    paper: ClassVar[str] = "Dehghani et al. 2019, arXiv:1807.03819"
    base: float = 10000.0

    def __post_init__(self) -> None:
        check_base("UniversalSinusoid", self.base)

    def check(self, choices: SpecView) -> None:
        """Raise ValueError if the width is odd."""
        check_even_width(self, choices)

    def build_embedding(self, width: int, heads: int) -> "UniversalSinusoidEmbedding":
        return UniversalSinusoidEmbedding(self)


class UniversalSinusoidEmbedding(PositionEmbedding):
    """Module of `UniversalSinusoid`."""

    def __init__(self, spec: UniversalSinusoid):
        super().__init__()
        self.waves = Sinusoidal(spec.base)

    def signal(self, x: Tensor, position: Tensor, number: int) -> Tensor:
        of_position = self.waves.encode(position, x.shape[-1])
        of_pass = self.waves.encode(torch.tensor(number + 1, device=x.device), x.shape[-1])
        return (of_position + of_pass).to(x.dtype)
