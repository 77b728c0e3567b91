"""kNN-LM: what followed on similar outputs, at a fixed share of the distribution."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.checks import check_finite_number
from rlxf.attention.heads.base import HeadReader, OutputHead
from rlxf.attention.heads.datastore import Neighbours


@dataclass(frozen=True)
class KNNLM(OutputHead):
    r"""``p(v | x) = lambda p_kNN(v | x) + (1 - lambda) p_model(v | x)``; nothing is learned.

    ``p_kNN(v | x) = sum of exp(-d_i^2 / T) over neighbours i with value v``, over the same sum of all k, with
    ``d_i = |key_i - h(x)|``, h the transformer's output. The paper says L2; the authors' code, whose results
    these are, takes its square, and so do we. T = 1 in both.

    Source: Khandelwal et al. 2020, arXiv:1911.00172, section 2, and the authors' code.

    Args:
        k: neighbours; 1024 in the paper, of 100 million pairs.
        temperature: T; large values let all neighbours count alike.
        index: who finds them: "torch", or "faiss" with the extra knn. Both find the same.
        weight: lambda, from 0, the model alone, to 1, the neighbours alone; 0.25 in the paper.

    Raises:
        TypeError: if k is no whole number, or another one no number.
        ValueError: if k is less than 1, temperature not above 0, weight not from 0 to 1, or there is no such
            index.
    """

    paper: ClassVar[str] = "Khandelwal et al. 2020, arXiv:1911.00172"
    weight: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite_number("KNNLM weight", self.weight)
        if not 0 <= self.weight <= 1:
            raise ValueError(f"KNNLM weight (lambda) must be from 0 to 1, got {self.weight}")

    def build(self, width: int) -> "KNNLMReader":
        """See `OutputHead`."""
        return KNNLMReader(self)

    def among(self, near: Neighbours, size: int) -> Tensor:
        """p_kNN of each of V = ``size`` values, (B, V)."""
        weights = self.weights(near)
        return weights.new_zeros(len(weights), size).scatter_add(1, near.values, weights)

    def mixed(self, log_p: Tensor, p_near: Tensor) -> Tensor:
        """log p from log p_model and p_kNN, both (B, V)."""
        share = torch.tensor(self.weight, dtype=log_p.dtype, device=log_p.device)
        return torch.logaddexp(log_p + (1 - share).log(), p_near.log() + share.log())


class KNNLMReader(HeadReader):
    """A `KNNLM` at work. It has no weights."""

    def __init__(self, spec: KNNLM):
        super().__init__()
        self.spec = spec

    def share(self, h: Tensor) -> Tensor:
        """lambda."""
        return h.new_full(h.shape[:1], self.spec.weight)

    def log_prob(self, h: Tensor, near: Neighbours, weight: Tensor, bias: Tensor) -> Tensor:
        """See `HeadReader`."""
        log_p = F.linear(h, weight, bias).log_softmax(dim=1)
        return self.spec.mixed(log_p, self.spec.among(near, len(weight)))
