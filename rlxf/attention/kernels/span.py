"""Base of softmax attention with soft span masks, `AdaptiveSpan` and `DynamicSpan`."""

from abc import abstractmethod

import torch
from torch import Tensor

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.base import PairwiseKernel
from rlxf.attention.kernels.softmax import SoftmaxAttention, weighted_average
from rlxf.attention.validation import check_bool, check_int, check_not_negative


class SpanKernel(PairwiseKernel):
    """Base of `AdaptiveSpan` and `DynamicSpan`, which document the options."""

    limit: int
    ramp: int
    penalty: float
    include_self: bool

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_int(f"{name} limit", self.limit)
        check_int(f"{name} ramp", self.ramp)
        check_int(f"{name} limit + ramp", self.limit + self.ramp)
        check_not_negative(f"{name} penalty", self.penalty)
        check_bool(f"{name} include_self", self.include_self)

    @property
    def softmax_distance(self) -> int:
        """The longest span."""
        return self.limit


class SpanAttention(SoftmaxAttention):
    """``a_ij = m(i - j) exp(s_ij) / sum_k m(i - k) exp(s_ik)``, ``m(x) = min(max((R + z - x) / R, 0), 1)``.

    ``log m`` is added to the scores; a key with m = 0 is masked. Without ``include_self`` the token itself is
    masked as well.
    """

    def __init__(self, spec: SpanKernel):
        super().__init__()
        self.spec = spec

    @abstractmethod
    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Split q (B, H, Tq, D + E) into queries and z in tokens, (B or 1, H, Tq or 1, 1)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask, dropout: float
    ) -> Tensor:
        return weighted_average(self.weights(q, k, bias, mask, dropout), v)

    def weights(
        self, q: Tensor, k: Tensor, bias: Tensor | None, mask: AttentionMask, dropout: float
    ) -> Tensor:
        """Return the weights; those of a query without a visible key within its span are 0."""
        q, z = self.split(q)
        ramp = self.spec.ramp
        m = ((ramp + z - mask.distance.abs()[:, None]) / ramp).clamp(0, 1)
        within = m > 0 if self.spec.include_self else (m > 0) & (mask.distance != 0)[:, None]
        fully_masked = ~(within & mask.allowed_by_head).any(-1, keepdim=True)
        log_m = torch.where(within, m, 1.0).log().masked_fill(~within & ~fully_masked, -torch.inf)
        bias = log_m if bias is None else bias + log_m
        return super().weights(q, k, bias, mask, dropout).masked_fill(fully_masked, 0.0)
