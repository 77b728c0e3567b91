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

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor, dropout: float
    ) -> Tensor:
        """See `Kernel`."""
        if bias is None and not self.softmax1:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2) if bias is None else scaled_scores(q, k, bias)
        weights = self.weights(scores.add_(mask))
        weights = F.dropout(weights, dropout) if dropout else weights
        return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).unflatten(0, weights.shape[:2])

    def weights(self, scores: Tensor) -> Tensor:
        """Scores (..., Tk) -> weights (..., Tk)."""
        if not self.softmax1:
            return scores.softmax(dim=-1)
        return F.pad(scores, (0, 1)).softmax(dim=-1)[..., :-1]


def scaled_scores(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """``q_i . k_j / sqrt(D) + b_ij`` in one pass: (B, H, Tq, D), (B, H, Tk, D) -> (B, H, Tq, Tk)."""
    shape = (*q.shape[:3], k.shape[2])
    scores = torch.baddbmm(
        bias.expand(shape).flatten(0, 1),
        q.flatten(0, 1),
        k.flatten(0, 1).transpose(1, 2),
        alpha=q.shape[-1] ** -0.5,
    )
    return scores.view(shape)
