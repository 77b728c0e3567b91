"""Sinusoidal positions: fixed sines and cosines, added to the tokens once or before each pass."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.positions.base import PositionEmbedding, SinusoidPosition


@dataclass(frozen=True)
class Sinusoidal(SinusoidPosition):
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

    def check_without_attention(self) -> None:
        """Do nothing: the position is added to the tokens."""

    def build_embedding(self, width: int, heads: int) -> "SinusoidalEmbedding":
        return SinusoidalEmbedding(self)


class SinusoidalEmbedding(PositionEmbedding):
    """Module of `Sinusoidal`."""

    def __init__(self, spec: Sinusoidal):
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return x + self.spec.encode(position, x.shape[-1]).to(x.dtype)


@dataclass(frozen=True)
class UniversalSinusoid(SinusoidPosition):
    """``h_t += p_t + p_n`` before each pass n = 1 ... N, with p as in `Sinusoidal` and positions t from 0.

    Source: Dehghani et al. 2019, arXiv:1807.03819, section 2.1, equations 6 and 7.

    Args:
        base: longest wavelength over 2 pi, in tokens; above 1.

    Raises:
        ValueError: if base is not above 1 or not finite; in a spec, if the width is odd.
    """

    paper: ClassVar[str] = "Dehghani et al. 2019, arXiv:1807.03819"
    base: float = 10000.0

    def check_without_attention(self) -> None:
        """Do nothing: the position is added to the tokens."""

    def build_embedding(self, width: int, heads: int) -> "UniversalSinusoidEmbedding":
        return UniversalSinusoidEmbedding(self)


class UniversalSinusoidEmbedding(PositionEmbedding):
    """Module of `UniversalSinusoid`."""

    def __init__(self, spec: UniversalSinusoid):
        super().__init__()
        self.spec = spec

    def pass_embedding(self, x: Tensor, position: Tensor, pass_index: int) -> Tensor:
        of_position = self.spec.encode(position, x.shape[-1])
        of_pass = self.spec.encode(torch.tensor(pass_index + 1, device=x.device), x.shape[-1])
        return (of_position + of_pass).to(x.dtype)
