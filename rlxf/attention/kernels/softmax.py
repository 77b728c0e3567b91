"""Softmax attention, the kernel of the original transformer."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.dropout import dropout as drop_some
from rlxf.attention.kernels.base import AttentionKernel, PairwiseKernel, StepAverage
from rlxf.attention.patterns.base import UNLIMITED
from rlxf.utils.checks import check_bool
from rlxf.utils.matrix_products import products

LONGEST = 512
"""Number of keys up to which products of whole score matrices are faster than torch's fused kernel."""
LARGEST = 2**22
"""Largest number of scores for which they are used, 16 MiB in float32, since backward needs all scores."""


@dataclass(frozen=True)
class Softmax(PairwiseKernel):
    r"""``o_i = sum_j softmax_j(q_i . k_j / sqrt(D) + b_ij) v_j``.

    With ``softmax1``, a token may attend to nothing: ``exp(s_j) / (1 + sum_k exp(s_k))``. This equals softmax
    with one additional key whose score and value are 0.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1; softmax1: Miller 2023, "Attention is off by
    one".

    Args:
        softmax1: add 1 to the denominator.

    Raises:
        TypeError: if softmax1 is neither True nor False.
    """

    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "visible pairs"
    softmax1: bool = False
    softmax_distance = UNLIMITED

    def __post_init__(self) -> None:
        check_bool("Softmax softmax1", self.softmax1)

    def build(self, width: int, heads: int) -> "SoftmaxAttention":
        return SoftmaxAttention(self.softmax1)


class SoftmaxAttention(AttentionKernel):
    """Module of `Softmax` in one layer; it has no parameters."""

    def __init__(self, softmax1: bool = False):
        super().__init__()
        self.softmax1 = softmax1

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        has_own_weights = type(self).weights is not SoftmaxAttention.weights
        is_plain = bias is None and not (self.has_sink or self.active_dropout or has_own_weights)
        if is_plain and not prefers_whole_matrices(q, k):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.mask)
        weights = self.weights(q, k, bias, mask)
        return weighted_average(weights, v)

    def weights(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        bias = torch.zeros_like(mask.mask) if bias is None else bias
        terms = q.flatten(0, 1), k.flatten(0, 1), bias.expand(*q.shape[:3], k.shape[2]), mask.mask
        dtype = torch.promote_types(q.dtype, mask.dtype)  # they differ under torch.autocast
        scores: Tensor = _Scores.apply(*(x.to(dtype) for x in terms))  # type: ignore[no-untyped-call]
        if self.has_sink:
            return drop_some(self.append_sink(scores).softmax(dim=-1)[..., :-1], self.active_dropout)
        return drop_some(scores.softmax(dim=-1), self.active_dropout)

    def fused_step(self) -> StepAverage | None:
        return None if self.has_sink else _step_average

    @property
    def has_sink(self) -> bool:
        """True if the softmax has one more logit than keys, with value 0."""
        return self.softmax1

    def append_sink(self, scores: Tensor) -> Tensor:
        """Append the logit of the sink to scores (B, H, Tq, Tk): (B, H, Tq, Tk + 1); by default 0."""
        return F.pad(scores, (0, 1))


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute ``softmax(q k^T / sqrt(D) + mask) v``, like ``F.scaled_dot_product_attention``.

    Args:
        q, k: queries (B, H, Tq, D) and keys (B, H, Tk, D).
        v: values, (B, H, Tk, V).
        mask: terms of the scores, or True for visible pairs; broadcast to (B, H, Tq, Tk). None for all pairs.
    """
    if not prefers_whole_matrices(q, k):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    y: Tensor = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask)[0]
    return y


def prefers_whole_matrices(q: Tensor, k: Tensor) -> bool:
    """Return whether products of whole score matrices are faster than torch's fused kernel.

    That kernel multiplies small blocks, for which a call of oneDNN takes longer than the product.

    Args:
        q, k: queries (B, H, Tq, D) and keys (B, H, Tk, D).
    """
    if not products.in_use or q.device.type != "cpu" or q.dtype != torch.float32:
        return False
    return k.shape[2] <= LONGEST and q.shape[:3].numel() * k.shape[2] <= LARGEST


def weighted_average(weights: Tensor, v: Tensor) -> Tensor:
    """Multiply weights (B, H, Tq, Tk) by values (B, H, Tk, V): (B, H, Tq, V)."""
    return torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).unflatten(0, weights.shape[:2])


def _step_average(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Compute the `StepAverage` of `SoftmaxAttention`."""
    batch, _, size = q.shape
    scores = bias.flatten(0, 1).unsqueeze(1)
    scores = scores.baddbmm(q.view(-1, 1, size), k.flatten(0, 1).transpose(1, 2), alpha=size**-0.5)
    return torch.bmm(scores.softmax(dim=-1), v.flatten(0, 1)).view(batch, -1)


class _Scores(torch.autograd.Function):
    """``q_i . k_j / sqrt(D) + b_ij + m_ij`` in one buffer, (B, H, Tq, Tk), for q and k of (B H) heads.

    torch computes the gradient of k as ``q^T ds`` and transposes it, which is slow for narrow heads.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.scale = q.shape[-1] ** -0.5
        scores = (bias + mask).contiguous()
        scores.flatten(0, 1).baddbmm_(q, k.transpose(1, 2), alpha=ctx.scale)
        return scores

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        grad = grad_scores.flatten(0, 1)
        grad_q = torch.bmm(grad, k).mul_(ctx.scale)
        grad_k = torch.bmm(grad.transpose(1, 2), q).mul_(ctx.scale)
        return grad_q, grad_k, grad_scores, None
