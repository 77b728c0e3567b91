"""kNN-LM: mixes the values of similar outputs into the predicted distribution with a fixed weight."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.heads.base import Neighbors, OutputHead, OutputHeadModule, distance_weights
from rlxf.utils.checks import check_between, check_choice


def _root(squared: Tensor) -> Tensor:
    """Return the root of squared distances; a distance of 0 has gradient 0."""
    return squared.clamp(min=torch.finfo(squared.dtype).tiny).sqrt()


_DISTANCES = {"squared_l2": torch.positive, "l2": _root}
"""Functions of the squared L2 distance, by the value of `KNNLM.distance`."""


@dataclass(frozen=True)
class KNNLM(OutputHead):
    r"""Interpolation ``p(v | x) = lambda p_kNN(v | x) + (1 - lambda) p_model(v | x)`` without training.

    ``p_kNN(v | x)`` is the sum of ``exp(-d_i^2 / T)`` over neighbors i with value v, divided by the sum over
    all k neighbors. Here ``d_i = |key_i - h(x)|`` and h is the transformer's output. The authors' code, which
    produced the results, uses this square of the L2 distance. The paper prints the distance itself,
    ``exp(-d_i / T)``; ``distance="l2"`` selects it. T is 1 in both.

    Source: Khandelwal et al. 2020, arXiv:1911.00172, section 2, and the authors' code.

    Args:
        k: number of neighbors; 1024 of 100 million pairs in the paper.
        temperature: temperature T; large values weight all neighbors equally.
        index: search backend: "torch", or "faiss", which needs the extra ``knn``. Results are equal.
        weight: lambda, from 0 (model only) to 1 (neighbors only); 0.25 in the paper.
        distance: "squared_l2" as in the authors' code, or "l2" as printed in the paper.

    Raises:
        TypeError: if k is not an int, or another numeric option is not a number.
        ValueError: if k is less than 1, temperature is not positive, weight is not in [0, 1], or the index or
            the distance is unknown.
    """

    paper: ClassVar[str] = "Khandelwal et al. 2020, arXiv:1911.00172"
    weight: float = 0.25
    distance: Literal["squared_l2", "l2"] = "squared_l2"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("KNNLM weight (lambda)", self.weight, 0, 1)
        check_choice("KNNLM distance", self.distance, tuple(_DISTANCES))

    def build(self, width: int) -> "KNNLMModule":
        return KNNLMModule(self)

    def weights(self, near: Neighbors) -> Tensor:
        """Return ``exp(-d_i^2 / T)`` or ``exp(-d_i / T)`` of the neighbors, divided by the sum, (B, k)."""
        return distance_weights(_DISTANCES[self.distance](near.squared), self.temperature)

    def neighbor_distribution(self, near: Neighbors, size: int) -> Tensor:
        """Return p_kNN of each of V = ``size`` values, (B, V)."""
        weights = self.weights(near)
        return weights.new_zeros(len(weights), size).scatter_add(1, near.values, weights)

    def mixed(self, log_p: Tensor, p_near: Tensor) -> Tensor:
        """Return log p from log p_model and p_kNN, both (B, V)."""
        if self.weight == 0:
            return log_p
        found = p_near > 0  # the gradient of log 0 is not finite
        log_near = torch.where(found, p_near, 1).log().masked_fill(~found, -torch.inf)
        if self.weight == 1:
            return log_near
        weight = torch.tensor(self.weight, dtype=log_p.dtype, device=log_p.device)
        return torch.logaddexp(log_p + (1 - weight).log(), log_near + weight.log())


class KNNLMModule(OutputHeadModule):
    """Module of a `KNNLM` head. It has no parameters."""

    def __init__(self, spec: KNNLM):
        super().__init__()
        self.spec = spec

    def neighbor_weight(self, h: Tensor) -> Tensor:
        """Return lambda for each output."""
        return h.new_full(h.shape[:1], self.spec.weight)

    def log_prob(self, h: Tensor, near: Neighbors, weight: Tensor, bias: Tensor) -> Tensor:
        log_p = F.linear(h, weight, bias).log_softmax(dim=1)
        return self.spec.mixed(log_p, self.spec.neighbor_distribution(near, len(weight)))
