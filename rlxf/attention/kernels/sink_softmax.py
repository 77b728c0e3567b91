"""Softmax attention with a learned sink logit per head, which takes weight from all keys."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.kernels.base import PairwiseKernel
from rlxf.attention.kernels.softmax import SoftmaxAttention
from rlxf.attention.patterns.base import UNLIMITED
from rlxf.utils.checks import check_finite_number


@dataclass(frozen=True)
class SinkSoftmax(PairwiseKernel):
    r"""``a_ij = exp(s_ij) / (exp(b_h) + sum_k exp(s_ik))``, ``s_ij = q_i . k_j / sqrt(D) + bias_ij``.

    Each head h of each layer learns the logit b_h of a sink whose value is 0. The logit is neither
    scaled nor masked. The weights of a token sum to less than 1, so a head can attend to nothing. With
    b_h = 0 this is ``Softmax(softmax1=True)``; with b_h -> -inf it is `Softmax`.

    Source: OpenAI 2025, arXiv:2508.10925, section 2.2; the idea of sinks: Xiao et al. 2023,
    arXiv:2309.17453, section 3.3.

    Args:
        start: initial b_h of every head.

    Raises:
        TypeError: if start is not a number.
        ValueError: if start is not finite.
    """

    paper: ClassVar[str] = "OpenAI 2025, arXiv:2508.10925"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "visible pairs"
    start: float = 0.0
    softmax_distance = UNLIMITED

    def __post_init__(self) -> None:
        check_finite_number("SinkSoftmax start", self.start)

    def build(self, width: int, heads: int) -> "SinkSoftmaxAttention":
        return SinkSoftmaxAttention(self.start, heads)


class SinkSoftmaxAttention(SoftmaxAttention):
    """Module of `SinkSoftmax` in one layer; ``sink`` (H,) is b."""

    has_sink = True

    def __init__(self, start: float, heads: int):
        super().__init__()
        self.sink = nn.Parameter(torch.full((heads,), float(start)))

    def append_sink(self, scores: Tensor) -> Tensor:
        """Append the learned logit of each head to scores (B, H, Tq, Tk)."""
        sink = self.sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], dim=-1)
