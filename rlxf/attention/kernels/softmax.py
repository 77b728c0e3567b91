"""Softmax attention, the kernel of the original transformer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Softmax:
    r"""``o_i = sum_j softmax_j(q_i . k_j / sqrt(D) + b_ij) v_j``.

    With ``softmax1``, a token may attend to nothing: ``exp(s_j) / (1 + sum_k exp(s_k))``, which is
    softmax beside one more key whose score and value are 0.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1; softmax1: Miller 2023,
    "Attention is off by one".

    Args:
        softmax1: add 1 to the denominator.
    """

    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762"
    softmax1: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
        """See `Kernel`."""
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)) + bias
        weights = self.weights(scores)
        return F.dropout(weights, dropout) @ v if dropout else weights @ v

    def weights(self, scores: Tensor) -> Tensor:
        """Scores (..., Tk) -> weights (..., Tk)."""
        if not self.softmax1:
            return scores.softmax(dim=-1)
        return F.pad(scores, (0, 1)).softmax(dim=-1)[..., :-1]
