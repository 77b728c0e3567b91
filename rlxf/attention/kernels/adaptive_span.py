"""Softmax attention whose heads learn their attention span."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.kernels.span import SpanAttention, SpanKernel
from rlxf.attention.validation import check_finite_number


@dataclass(frozen=True)
class AdaptiveSpan(SpanKernel):
    r"""``a_ij = m(i - j) exp(s_ij) / sum_k m(i - k) exp(s_ik)``, ``m(x) = min(max((R + z - x) / R, 0), 1)``.

    Each head of each layer learns a span z in [0, S]. Tokens nearer than z have full weight; those beyond z +
    R have none and are not computed. The loss gets ``penalty mean_h z_h`` for each layer (lambda / M times
    the sum over M heads), which keeps spans as short as the task allows.

    A bidirectional transformer uses ``|i - j|``; that form is ours.

    Source: Sukhbaatar et al. 2019, arXiv:1905.07799, section 2.2.

    Args:
        limit: S, the longest span, in tokens.
        ramp: R, number of tokens over which the weight falls from 1 to 0; 32 as in the paper.
        start: initial z of every head, in tokens; None for S / 2. The paper starts near 0. A head gets no
            gradient from tokens that it does not see, and memory tasks depend on distant ones.
        penalty: lambda; 2e-6 as in the paper. With 0, spans grow without cost.
        include_self: whether a token attends to itself. The paper's sum, over t - S to t - 1, excludes it: a
            token's own content is then available through the residual only. The weighted average of the first
            token of an episode is 0, so its attention output is the bias of the output projection. True by
            default, unlike the paper: an agent acts on its current observation, and its heads can weigh it
            against the past.

    Raises:
        TypeError: if limit or ramp is not an integer, or include_self is neither True nor False.
        ValueError: if limit or ramp is less than 1, start is outside [0, S], or penalty is negative or not
            finite.
    """

    paper: ClassVar[str] = "Sukhbaatar et al. 2019, arXiv:1905.07799"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L span pairs"
    limit: int = 128
    ramp: int = 32
    start: float | None = None
    penalty: float = 2e-6
    include_self: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start is not None:
            self._check_start(self.start)

    def _check_start(self, start: float) -> None:
        check_finite_number("AdaptiveSpan start", start)
        if not 0 <= start <= self.limit:
            raise ValueError(f"AdaptiveSpan start must be in [0, limit {self.limit}], got {start}")

    def build(self, width: int, heads: int) -> "AdaptiveSpanAttention":
        return AdaptiveSpanAttention(self, heads)


class AdaptiveSpanAttention(SpanAttention):
    """Module of `AdaptiveSpan` in one layer; ``span`` (H,) is z / S."""

    def __init__(self, spec: AdaptiveSpan, heads: int):
        super().__init__(spec)
        start = spec.limit / 2 if spec.start is None else spec.start
        self.span = nn.Parameter(torch.full((heads,), start / spec.limit))

    @property
    def z(self) -> Tensor:
        """Span of each head, (H,), in tokens."""
        return self.span.clamp(0, 1) * self.spec.limit

    @property
    def max_distance(self) -> int:
        """Largest distance, in tokens, at which a head gives weight."""
        return math.ceil(float(self.z.detach().max())) + self.spec.ramp

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return q, self.z[:, None, None]

    def penalty(self) -> Tensor:
        return self.spec.penalty * self.z.mean()

    @torch.no_grad()
    def after_update(self) -> None:
        """Clamp spans to [0, S], where they have a gradient."""
        self.span.clamp_(0, 1)
