"""Softmax attention with learned attention spans: one for each head, or one predicted for each token."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.base import PairwiseKernel
from rlxf.attention.kernels.softmax import SoftmaxAttention, weighted_average
from rlxf.attention.technique import SpecView
from rlxf.attention.token_index import EMPTY
from rlxf.utils.checks import check_between, check_bool, check_int, check_not_negative


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

    def check(self, choices: SpecView) -> None:
        """Raise ValueError for cross-attention, where tokens have no distance."""
        if choices.cross_attention:
            raise ValueError(
                f"{self} weights keys by their distance, and with cross_attention=True queries and keys are "
                f"from different sequences; choose another kernel"
            )

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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        return weighted_average(self.weights(q, k, bias, mask), v)

    def weights(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        """Return the weights; those of a query without a visible key within its span are 0."""
        q, z = self.split(q)
        ramp = self.spec.ramp
        m = ((ramp + z - mask.distance.abs()[:, None]) / ramp).clamp(0, 1)
        within = m > 0 if self.spec.include_self else (m > 0) & (mask.distance != 0)[:, None]
        fully_masked = ~(within & mask.allowed_by_head).any(-1, keepdim=True)
        log_m = torch.where(within, m, 1.0).log().masked_fill(~within & ~fully_masked, -torch.inf)
        bias = log_m if bias is None else bias + log_m
        return super().weights(q, k, bias, mask).masked_fill(fully_masked, 0.0)


@dataclass(frozen=True)
class AdaptiveSpan(SpanKernel):
    r"""``a_ij = m(i - j) exp(s_ij) / sum_k m(i - k) exp(s_ik)``, ``m(x) = min(max((R + z - x) / R, 0), 1)``.

    Each head of each layer learns a span z in [0, S]. Tokens nearer than z have full weight; those beyond z +
    R have none and are not computed. The loss gets ``penalty mean_h z_h`` for each layer (lambda / M times
    the sum over M heads), which keeps spans as short as the task allows.

    A bidirectional transformer uses ``|i - j|``; that form is rlxf's variant.

    Source: Sukhbaatar et al. 2019, arXiv:1905.07799, section 2.2.

    Args:
        limit: S, the longest span, in tokens.
        ramp: R, number of tokens over which the weight falls from 1 to 0; 32 as in the paper.
        start: initial z of every head, in tokens; None for S / 2. The paper starts near 0. A head gets no
            gradient from tokens that it does not attend to, and memory tasks depend on distant ones.
        penalty: lambda; 2e-6 as in the paper. With 0, spans grow without cost.
        include_self: whether a token attends to itself. The paper's sum, over t - S to t - 1, excludes it: a
            token's own content is then available through the residual only. The pattern ``Window(S + 1)``
            gives the other end of this range; without it the ramp of a span near S reaches up to S + R. The
            weighted average of the first token of an episode is 0, so its attention output is the bias of the
            output projection. True by default, unlike the paper: an agent acts on its current observation,
            and its heads can weigh it against the past.

    Raises:
        TypeError: if limit or ramp is not an integer, or include_self is neither True nor False.
        ValueError: if limit or ramp is less than 1, start is outside [0, S], or penalty is negative or not
            finite; in a spec, with cross-attention.
    """

    paper: ClassVar[str] = "Sukhbaatar et al. 2019, arXiv:1905.07799"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "L span pairs"
    limit: int = 128
    ramp: int = 32
    start: float | None = None
    penalty: float = 2e-6
    include_self: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start is None:
            return
        check_between("AdaptiveSpan start", self.start, 0, self.limit)

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


@dataclass(frozen=True)
class DynamicSpan(SpanKernel):
    r"""`AdaptiveSpan` with a span for each token, head and layer: ``z_t = S sigmoid(v . x_t + b)``.

    x_t is the input of the layer's attention: after the layer norm with ``norm='pre'``. The loss gets
    ``penalty mean z_t``, over the heads and the tokens of the pass, once for each pass of each layer. Tokens
    without visible keys count as 0.

    Source: Sukhbaatar et al. 2019, arXiv:1905.07799, section 2.2, "Dynamic attention span".

    Args:
        limit: S, the longest span, in tokens.
        ramp: R, number of tokens over which the weight falls from 1 to 0; 32 as in the paper.
        penalty: lambda; 2e-6 as in the paper. With 0, spans grow without cost.
        include_self: whether a token attends to itself; see `AdaptiveSpan`. The paper's form is False.

    Raises:
        TypeError: if limit or ramp is not an integer, or include_self is neither True nor False.
        ValueError: if limit or ramp is less than 1, or penalty is negative or not finite; in a spec, with
            cross-attention.
    """

    paper: ClassVar[str] = "Sukhbaatar et al. 2019, arXiv:1905.07799"
    causal_form: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "visible pairs"
    limit: int = 128
    ramp: int = 32
    penalty: float = 2e-6
    include_self: bool = True

    @property
    def token_loss_option(self) -> str | None:
        return "penalty" if self.penalty > 0 else None

    def build(self, width: int, heads: int) -> "DynamicSpanAttention":
        return DynamicSpanAttention(self, width, heads)

    def build_part(self, width: int, heads: int, part_heads: int) -> "DynamicSpanAttention":
        return DynamicSpanAttention(self, width, part_heads)


class DynamicSpanAttention(SpanAttention):
    """Module of `DynamicSpan` in one layer.

    ``span`` (C -> H) holds v and b. Both start at 0, which makes z = S / 2.
    """

    def __init__(self, spec: DynamicSpan, width: int, heads: int):
        super().__init__(spec)
        self.span = nn.Linear(width, heads)
        nn.init.zeros_(self.span.weight)
        nn.init.zeros_(self.span.bias)
        self.penalty_weight = spec.penalty

    @property
    def max_distance(self) -> int:
        """Largest distance, in tokens, at which a token can give weight: S + R."""
        return self.spec.limit + self.spec.ramp

    def query_extras(self, x: Tensor) -> Tensor:
        """Return z of each token x (B, T, C), in tokens: (B, H, T, 1)."""
        z: Tensor = self.span(x).sigmoid() * self.spec.limit
        return z.transpose(1, 2)[..., None]

    def split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return q[..., :-1], q[..., -1:]

    def transform_in_context(self, q: Tensor, k: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Record the mean z of a pass with gradient, for `penalty`.

        Tokens without visible keys do not add to the sum. If global tokens have their own module, each token
        therefore counts in one of the two.
        """
        if self.spec.penalty > 0 and torch.is_grad_enabled():
            filled, masked = mask.query.episode != EMPTY, mask.fully_masked
            counted = filled if masked is None else filled & ~masked
            self.penalty_terms.append((q[..., -1].mean(1) * counted).sum() / filled.sum().clamp(min=1))
        return q, k
