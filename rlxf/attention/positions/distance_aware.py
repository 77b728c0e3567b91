"""DA-Transformer: distance multiplies the scores, in each head by a curve of its own."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.positions.base import LayerPosition, PairwisePosition
from rlxf.attention.relation import Relation


@dataclass(frozen=True)
class DistanceAware(PairwisePosition):
    r"""``s_ij = ReLU(q_i . k_j) f(alpha_h |i - j|) / sqrt(D)``, ``f(x) = (1 + e^b_h) / (1 + e^(b_h - x))``.

    f(0) = 1. With alpha < 0 a head prefers what is near: f falls to 0; with alpha > 0 what is far: f
    rises to ``1 + e^b``. Alpha and b (the paper's v) start at 0, where no head prefers anything. Hidden keys
    are hidden behind all this: a score of 0 still has weight.

    It is a position, though it bends the scores: it says how order enters, and goes with any
    kernel that takes scores from positions. The kernel adds what turns ``q_i . k_j`` into the above.
    The causal form is ours; the paper reads whole sentences.

    Source: Wu et al. 2021, arXiv:2010.06925, section 3.2.
    """

    paper: ClassVar[str] = "Wu et al. 2021, arXiv:2010.06925"
    causal: ClassVar[str] = "ours"

    def build(self, width: int, heads: int) -> "DistanceWeights":
        return DistanceWeights(heads)


class DistanceWeights(LayerPosition):
    """alpha (H,) and beta (H,) of a `DistanceAware` in one layer."""

    def __init__(self, heads: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(heads))
        self.beta = nn.Parameter(torch.zeros(heads))

    def table(self, distances: Tensor, shared: Tensor | None) -> Tensor:
        """distances (R,) -> f (H, R)."""
        x = self.alpha[:, None] * distances.abs()
        beta = self.beta[:, None]
        return (1 + beta.exp()) * (x - beta).sigmoid()

    def bias(self, q: Tensor, k: Tensor, relation: Relation, table: Tensor | None) -> Tensor:
        """What turns ``s = q_i . k_j / sqrt(D)`` into ``ReLU(s) f``: (B, H, Tq, Tk)."""
        assert table is not None
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return s.relu() * relation.spread(table) - s
