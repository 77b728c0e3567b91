"""SPALM: neighbours' values as features, let in by a learned gate."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.heads.base import HeadReader, OutputHead
from rlxf.attention.heads.datastore import Neighbours


@dataclass(frozen=True)
class SPALM(OutputHead):
    r"""``p(v | x) = softmax(W z)`` with ``z = (1 - g) m + g h`` and a gate ``g = sigmoid(w_g . h)``.

    ``m = sum_i softmax_i(y_i . h) y_i``: neighbours look each other up by what followed on them, not by
    distance; ``y_i = W[v_i]``, the row of the output layer, for its value. h is the transformer's output; at
    g = 1 it counts alone. The gate starts at one half. It has to be learned, on pairs that are not their own
    neighbours.

    Values that are numbers have no row in W. There the gate mixes numbers (ours): the neighbours' share is
    1 - g, and they count among themselves by distance, as in `KNNLM`.

    Source: Yogatama et al. 2021, arXiv:2102.02557, section 2.3, equations 3 to 5.

    Args:
        k: neighbours; 4 in the paper.
        temperature: T of the weights by distance; only where values are numbers.
        index: who finds them: "torch", or "faiss" with the extra knn. Both find the same.

    Raises:
        TypeError: if k is no whole number, or another one no number.
        ValueError: if k is less than 1, temperature not above 0, or there is no such index.
    """

    paper: ClassVar[str] = "Yogatama et al. 2021, arXiv:2102.02557"

    def build(self, width: int) -> "SPALMReader":
        """See `OutputHead`."""
        return SPALMReader(width)


class SPALMReader(HeadReader):
    """A `SPALM` at work: w_g (C,)."""

    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(width))

    def openness(self, h: Tensor) -> Tensor:
        """g: (..., C) -> (...)."""
        return (h @ self.gate).sigmoid()

    def share(self, h: Tensor) -> Tensor:
        """1 - g."""
        return 1 - self.openness(h)

    def features(self, h: Tensor, y: Tensor) -> Tensor:
        """z of outputs h (B, C) and the features y (B, k, C) of their neighbours' values."""
        g = self.openness(h)[:, None]
        return (1 - g) * gathered(h, y) + g * h

    def log_prob(self, h: Tensor, near: Neighbours, weight: Tensor, bias: Tensor) -> Tensor:
        """See `HeadReader`."""
        z = self.features(h, weight[near.values])
        return F.linear(z, weight, bias).log_softmax(dim=1)


def gathered(h: Tensor, y: Tensor) -> Tensor:
    """``m = sum_i softmax_i(y_i . h) y_i``: (B, C) and (B, k, C) -> (B, C)."""
    attention = torch.einsum("bkc,bc->bk", y, h).softmax(dim=1)
    return torch.einsum("bk,bkc->bc", attention, y)
