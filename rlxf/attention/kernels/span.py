"""Base of softmax attention with soft span masks, `AdaptiveSpan` and `DynamicSpan`."""

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.softmax import SoftmaxAttention, weighted_average
from rlxf.attention.validation import check_bool, check_int, check_not_negative


class SpanOptions(Protocol):
    """Options of a span; see `AdaptiveSpan` and `DynamicSpan`."""

    @property
    def limit(self) -> int: ...

    @property
    def ramp(self) -> int: ...

    @property
    def penalty(self) -> float: ...

    @property
    def include_self(self) -> bool: ...


def check_span(span: SpanOptions) -> None:
    """Raise TypeError or ValueError unless the options of a span are in range."""
    name = type(span).__name__
    check_int(f"{name} limit", span.limit)
    check_int(f"{name} ramp", span.ramp)
    check_int(f"{name} limit + ramp", span.limit + span.ramp)
    check_not_negative(f"{name} penalty", span.penalty)
    check_bool(f"{name} include_self", span.include_self)


class SpanAttention(SoftmaxAttention):
    """``a_ij = m(i - j) exp(s_ij) / sum_k m(i - k) exp(s_ik)``, ``m(x) = min(max((R + z - x) / R, 0), 1)``.

    ``log m`` is added to the scores; a key with m = 0 is masked. Without ``include_self`` the token itself is
    masked as well.
    """

    def __init__(self, spec: SpanOptions):
        super().__init__()
        self.spec = spec

    @abstractmethod
    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Split q (B, H, Tq, D + E) into queries and z in tokens, (B or 1, H, Tq or 1, 1)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relation: AttentionMask, dropout: float
    ) -> Tensor:
        return weighted_average(self.weights(q, k, bias, relation, dropout), v)

    def weights(
        self, q: Tensor, k: Tensor, bias: Tensor | None, relation: AttentionMask, dropout: float
    ) -> Tensor:
        """Return the weights; those of a query without a visible key within its span are 0."""
        q, z = self.split(q)
        ramp = self.spec.ramp
        m = ((ramp + z - relation.distance.abs()[:, None]) / ramp).clamp(0, 1)
        within = m > 0 if self.spec.include_self else (m > 0) & (relation.distance != 0)[:, None]
        fully_masked = ~(within & relation.allowed_by_head).any(-1, keepdim=True)
        log_m = torch.where(within, m, 1.0).log().masked_fill(~within & ~fully_masked, -torch.inf)
        bias = log_m if bias is None else bias + log_m
        return super().weights(q, k, bias, relation, dropout).masked_fill(fully_masked, 0.0)
