"""Softmax attention with an attention span predicted for each token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.span import SpanAttention, SpanKernel
from rlxf.attention.token_index import EMPTY


@dataclass(frozen=True)
class DynamicSpan(SpanKernel):
    r"""`AdaptiveSpan` with a span for each token, ``z_t = S sigmoid(v . x_t + b)``, head and layer.

    x_t is the input of the layer's attention: after the layer norm with ``norm='pre'``. The loss gets
    ``penalty mean z_t``, over the heads and the tokens of the pass, once for each pass of each layer.

    Source: Sukhbaatar et al. 2019, arXiv:1905.07799, section 2.2, "Dynamic attention span".

    Args:
        limit: S, the longest span, in tokens.
        ramp: R, number of tokens over which the weight falls from 1 to 0; 32 as in the paper.
        penalty: lambda; 2e-6 as in the paper. With 0, spans grow without cost.
        include_self: whether a token attends to itself; see `AdaptiveSpan`. The paper's form is False.

    Raises:
        TypeError: if limit or ramp is not an integer, or include_self is neither True nor False.
        ValueError: if limit or ramp is less than 1, or penalty is negative or not finite.
    """

    paper: ClassVar[str] = "Sukhbaatar et al. 2019, arXiv:1905.07799"
    causal: ClassVar[str] = "the paper's"
    cost: ClassVar[str] = "pairs seen"
    limit: int = 128
    ramp: int = 32
    penalty: float = 2e-6
    include_self: bool = True

    @property
    def loss_depends_on_tokens(self) -> bool:
        return self.penalty > 0

    def build(self, width: int, heads: int) -> "DynamicSpanAttention":
        return DynamicSpanAttention(self, width, heads)


class DynamicSpanAttention(SpanAttention):
    """Module of `DynamicSpan` in one layer.

    ``span`` (C -> H) holds v and b. Both start at 0, which makes z = S / 2.
    """

    def __init__(self, spec: DynamicSpan, width: int, heads: int):
        super().__init__(spec)
        self.span = nn.Linear(width, heads)
        nn.init.zeros_(self.span.weight)
        nn.init.zeros_(self.span.bias)
        self._mean_z: list[Tensor] = []

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

    def before_gathering(self, q: Tensor, k: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Record the mean z of a pass with gradient, for `penalty`."""
        if self.spec.penalty > 0 and torch.is_grad_enabled():
            filled = mask.query.episode != EMPTY
            self._mean_z.append((q[..., -1].mean(1) * filled).sum() / filled.sum().clamp(min=1))
        return q, k

    def reset_penalty(self) -> None:
        self._mean_z = []

    def penalty(self) -> Tensor | None:
        """Return ``penalty mean z_t`` of the passes since the last call; None if there is none."""
        mean_z, self._mean_z = self._mean_z, []
        return self.spec.penalty * torch.stack(mean_z).sum() if mean_z else None
