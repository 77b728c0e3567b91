"""SPALM: features of the neighbors' values, mixed in by a learned gate."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.heads.base import Neighbors, OutputHead, OutputHeadModule


@dataclass(frozen=True)
class SPALM(OutputHead):
    r"""Output ``p(v | x) = softmax(W z)`` with ``z = (1 - g) m + g h`` and gate ``g = sigmoid(w_g . h)``.

    ``m = sum_i softmax_i(y_i . h) y_i``, where ``y_i = W[v_i]`` is the row of the output layer for the
    neighbor's value. Neighbors are weighted by their values, not by distance. h is the transformer's
    output; g = 1 uses h only. The gate starts at 0.5. It must be trained on queries whose own pair is
    excluded from their neighbors.

    Continuous values have no row in W. For them the gate mixes the values themselves, which is our extension:
    the weight of the neighbors is 1 - g, and neighbors are weighted by distance, as in `KNNLM`.

    Source: Yogatama et al. 2021, arXiv:2102.02557, section 2.3, equations 3 to 5.

    Args:
        k: number of neighbors; 4 in the paper.
        temperature: temperature T of the distance weights; used for continuous values only.
        index: search backend: "torch", or "faiss", which needs the extra ``knn``. Results are equal.

    Raises:
        TypeError: if k is not an int, or another numeric option is not a number.
        ValueError: if k is less than 1, temperature is not positive, or the index is unknown.
    """

    paper: ClassVar[str] = "Yogatama et al. 2021, arXiv:2102.02557"

    def build(self, width: int) -> "SPALMModule":
        return SPALMModule(width)


class SPALMModule(OutputHeadModule):
    """Module of a `SPALM` head with the gate weights w_g (C,)."""

    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(width))

    def model_weight(self, h: Tensor) -> Tensor:
        """Return the gate g: h (..., C) -> (...)."""
        return (h @ self.gate).sigmoid()

    def neighbor_weight(self, h: Tensor) -> Tensor:
        """Return 1 - g."""
        return 1 - self.model_weight(h)

    def features(self, h: Tensor, y: Tensor) -> Tensor:
        """Return z of outputs h (B, C) and the features y (B, k, C) of their neighbors' values."""
        g = self.model_weight(h)[:, None]
        return (1 - g) * aggregate_neighbors(h, y) + g * h

    def log_prob(self, h: Tensor, near: Neighbors, weight: Tensor, bias: Tensor) -> Tensor:
        z = self.features(h, weight[near.values])
        return F.linear(z, weight, bias).log_softmax(dim=1)


def aggregate_neighbors(h: Tensor, y: Tensor) -> Tensor:
    """Compute ``m = sum_i softmax_i(y_i . h) y_i``: h (B, C) and y (B, k, C) -> (B, C)."""
    attention = torch.einsum("bkc,bc->bk", y, h).softmax(dim=1)
    return torch.einsum("bk,bkc->bc", attention, y)
