"""DA-Transformer: scores multiplied by a learned function of the distance in each head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.base import PairwiseLayerPosition, PairwisePosition


@dataclass(frozen=True)
class DistanceAware(PairwisePosition):
    r"""``s_ij = ReLU(q_i . k_j) f(alpha_h |i - j|) / sqrt(D)``, ``f(x) = (1 + e^b_h) / (1 + e^(b_h - x))``.

    f(0) = 1. With alpha < 0 a head prefers near tokens: f falls to 0. With alpha > 0 it prefers far tokens: f
    rises to ``1 + e^b``. Alpha and b (the paper's v) start at 0, where f = 1 at all distances. Keys are
    masked after this term: a score of 0 still has weight.

    The technique is a position because it encodes order, although it also changes the scores. It works with
    every kernel that accepts a bias. The bias is the difference of the above and ``q_i . k_j / sqrt(D)``. The
    causal form is rlxf's variant; the paper encodes whole sentences.

    Source: Wu et al. 2021, arXiv:2010.06925, section 3.2.
    """

    paper: ClassVar[str] = "Wu et al. 2021, arXiv:2010.06925"
    causal_form: ClassVar[str] = "rlxf's"

    def build(self, width: int, heads: int) -> "DistanceAwareBias":
        return DistanceAwareBias(heads)


class DistanceAwareBias(PairwiseLayerPosition):
    """Module of `DistanceAware` in one layer: alpha (H,) and beta (H,)."""

    def __init__(self, heads: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(heads))
        self.beta = nn.Parameter(torch.zeros(heads))

    def table(self, distances: Tensor, shared: Tensor | None) -> Tensor:
        """Return f (H, R) for distances (R,)."""
        x = self.alpha[:, None] * distances.abs()
        beta = self.beta[:, None]
        return (F.softplus(beta) + F.logsigmoid(x - beta)).exp()  # e^beta alone overflows

    def bias(self, q: Tensor, k: Tensor, mask: AttentionMask, table: Tensor | None) -> Tensor:
        """Return the difference of ``ReLU(s) f`` and ``s = q_i . k_j / sqrt(D)``: (B, H, Tq, Tk)."""
        assert table is not None
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return s.relu() * mask.relative.lookup(table) - s
