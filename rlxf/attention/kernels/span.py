"""Softmax attention in which weights fade with the distance: what the two kinds of spans share."""

from abc import abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from rlxf.attention.checks import check_flag, check_not_negative, check_whole
from rlxf.attention.kernels.softmax import SoftmaxAverage, averaged
from rlxf.attention.relation import Relation


class Span(Protocol):
    """The settings of a span; see `AdaptiveSpan` and `DynamicSpan`."""

    @property
    def limit(self) -> int: ...

    @property
    def ramp(self) -> int: ...

    @property
    def penalty(self) -> float: ...

    @property
    def include_self(self) -> bool: ...


def check_span(span: Span) -> None:
    """Raise TypeError or ValueError unless a span's settings are in range."""
    name = type(span).__name__
    check_whole(f"{name} limit", span.limit)
    check_whole(f"{name} ramp", span.ramp)
    check_whole(f"{name} limit + ramp", span.limit + span.ramp)
    check_not_negative(f"{name} penalty", span.penalty)
    check_flag(f"{name} include_self", span.include_self)


class SpanAverage(SoftmaxAverage):
    """``a_ij = m(i - j) exp(s_ij) / sum_k m(i - k) exp(s_ik)``, ``m(x) = min(max((R + z - x) / R, 0), 1)``.

    ``log m`` is added to the scores; where m is 0 a key is hidden, as by a mask. Without ``include_self``
    the token itself is hidden as well.
    """

    def __init__(self, spec: Span):
        super().__init__()
        self.spec = spec

    @abstractmethod
    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """q (B, H, Tq, D) without marks, and z in tokens, (B or 1, H, Tq or 1, 1)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        """See `LayerKernel`."""
        return averaged(self.weights(q, k, bias, relation, dropout), v)

    def weights(
        self, q: Tensor, k: Tensor, bias: Tensor | None, relation: Relation, dropout: float
    ) -> Tensor:
        """See `LayerPairwise`. A query whose span ends before the first key it may see gets nothing."""
        q, z = self.split(q)
        ramp = self.spec.ramp
        m = ((ramp + z - relation.distance.abs()[:, None]) / ramp).clamp(0, 1)
        within = m > 0 if self.spec.include_self else (m > 0) & (relation.distance != 0)[:, None]
        blind = ~(within & relation.allowed_by_head).any(-1, keepdim=True)
        fading = torch.where(within, m, 1.0).log().masked_fill(~within & ~blind, -torch.inf)
        bias = fading if bias is None else bias + fading
        return super().weights(q, k, bias, relation, dropout).masked_fill(blind, 0.0)
