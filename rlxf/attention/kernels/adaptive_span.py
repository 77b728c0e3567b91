"""Softmax attention whose heads learn how far they look back."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.checks import check_finite_number
from rlxf.attention.kernels.base import PairwiseKernel
from rlxf.attention.kernels.span import SpanAverage, check_span


@dataclass(frozen=True)
class AdaptiveSpan(PairwiseKernel):
    r"""``a_ij = m(i - j) exp(s_ij) / sum_k m(i - k) exp(s_ik)``, ``m(x) = min(max((R + z - x) / R, 0), 1)``.

    Each head of each layer learns a span z in [0, S]. Tokens nearer than z count in full, those beyond z + R
    not at all: they are not computed. The loss gets ``penalty mean_h z_h`` for each layer (lambda / M times
    the sum over M heads), so that spans are no longer than they pay for.

    A transformer that is not causal takes ``|i - j|``; that form is ours.

    Source: Sukhbaatar et al. 2019, arXiv:1905.07799, section 2.2.

    Args:
        limit: S, the longest span, in tokens.
        ramp: R, over how many tokens the weight falls from 1 to 0; 32 as in the paper.
        start: z of every head at first, in tokens; None for S / 2. The paper starts near 0. A head learns
            nothing of tokens that it does not see, and memory tasks live by far ones.
        penalty: lambda; 2e-6 as in the paper. 0 lets spans grow for free.
        include_self: whether a token attends to itself. The paper's sum, over t - S to t - 1, excludes it:
            a token's own content is then available through the residual only. The weighted average of the
            first token of an episode is 0, so its attention output is the bias of the output projection.
            True by default, unlike the paper: an agent acts on its current observation, and its heads can
            weigh it against the past.

    Raises:
        TypeError: if limit or ramp is no whole number, or include_self neither True nor False.
        ValueError: if one is less than 1, start is outside [0, S] or penalty is negative or not finite.
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
        check_span(self)
        if self.start is not None:
            self._check_start(self.start)

    def _check_start(self, start: float) -> None:
        check_finite_number("AdaptiveSpan start", start)
        if not 0 <= start <= self.limit:
            raise ValueError(f"AdaptiveSpan start must be in [0, limit {self.limit}], got {start}")

    def build(self, width: int, heads: int) -> "AdaptiveSpanAverage":
        """See `Kernel`."""
        return AdaptiveSpanAverage(self, heads)


class AdaptiveSpanAverage(SpanAverage):
    """``span`` (H,) is z / S of an `AdaptiveSpan` in one layer."""

    def __init__(self, spec: AdaptiveSpan, heads: int):
        super().__init__(spec)
        start = spec.limit / 2 if spec.start is None else spec.start
        self.span = nn.Parameter(torch.full((heads,), start / spec.limit))

    @property
    def z(self) -> Tensor:
        """(H,), in tokens."""
        return self.span.clamp(0, 1) * self.spec.limit

    @property
    def reach(self) -> int:
        """Beyond this distance, in tokens, no head gives weight."""
        return math.ceil(float(self.z.detach().max())) + self.spec.ramp

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """See `SpanAverage`."""
        return q, self.z[:, None, None]

    def penalty(self) -> Tensor:
        """See `LayerKernel`."""
        return self.spec.penalty * self.z.mean()

    @torch.no_grad()
    def after_update(self) -> None:
        """Bring spans back into [0, S], where they have a gradient."""
        self.span.clamp_(0, 1)
