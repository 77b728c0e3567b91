"""ALiBi: a penalty on scores that is linear in the distance, with a slope for each head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.base import PairwisePosition, PositionEmbedding


def slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """Return the slopes on a device, (H,) float64: ``2^(-8h/H)`` for h = 1 ... H if H is a power of two.

    Otherwise they are the slopes of the next lower power of two, then every second slope of twice that power.
    """
    power = 1 << (heads.bit_length() - 1)
    exact = 2.0 ** (-8.0 / power * torch.arange(1, power + 1, dtype=torch.float64, device=device))
    between = 2.0 ** (-4.0 / power * torch.arange(1, 2 * power, 2, dtype=torch.float64, device=device))
    return torch.cat([exact, between[: heads - power]])


@dataclass(frozen=True)
class ALiBi(PairwisePosition):
    """``s_ij -= slope_h * |i - j|``, added after the division by sqrt(head size); nothing is learned.

    The bidirectional form treats both directions alike.

    Source: Press et al. 2022, arXiv:2108.12409, section 3; slopes for head counts that are not a power of two
    from the authors' code.
    """

    paper: ClassVar[str] = "Press et al. 2022, arXiv:2108.12409"

    def build_embedding(self, width: int, heads: int) -> "ALiBiPenalty":
        return ALiBiPenalty(heads)


class ALiBiPenalty(PositionEmbedding):
    """Module of `ALiBi` for all layers. It computes the slopes, as a buffer would be cast with the model."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads = heads

    def table(self, distances: Tensor, causal: bool) -> Tensor:
        """Return ``-slope_h * |distance|`` (H, R) for distances (R,)."""
        return -slopes(self.heads, distances.device)[:, None] * distances.abs()

    def bias(self, mask: AttentionMask) -> Tensor:
        """Return ``-slope_h * |i - j|`` (B or 1, H, Tq, Tk)."""
        assert mask.relative.shared is not None
        return mask.relative.lookup(mask.relative.shared.to(mask.dtype))
