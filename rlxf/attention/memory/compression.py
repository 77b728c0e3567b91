"""Compression functions of the Compressive Transformer."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

Method = Literal["mean", "max", "convolution", "dilated", "most-used"]

Usage = Callable[[Tensor], Tensor]
"""Function from tokens (N, L, C) of N blocks to the attention that each token receives, (N, L)."""


class Compression(nn.Module, ABC):
    """Base of the functions that compress c tokens to one.

    Args:
        width: features of a token C.
        ratio: compression ratio c.
    """

    def __init__(self, width: int, ratio: int):
        super().__init__()
        self.ratio = ratio

    @abstractmethod
    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        """Compress tokens (N, L, C), oldest first, L a multiple of c -> (N, L / c, C)."""


class Mean(Compression):
    """Mean pooling over c tokens."""

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        """See `Compression`."""
        return tokens.unflatten(1, (-1, self.ratio)).mean(2)


class Max(Compression):
    """Max pooling over c tokens, per feature."""

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        """See `Compression`."""
        return tokens.unflatten(1, (-1, self.ratio)).amax(2)


class Convolution(Compression):
    """Convolution over time with kernel size and stride c: ``sum_t W_t x_t + b``.

    W is initialized orthogonally, so that tokens of unit variance give outputs of unit variance.
    """

    def __init__(self, width: int, ratio: int):
        super().__init__(width, ratio)
        self.convolution = self._convolution(width, ratio)
        nn.init.orthogonal_(self.convolution.weight)
        nn.init.zeros_(self.convolution.bias)  # type: ignore[arg-type]

    @staticmethod
    def _convolution(width: int, ratio: int) -> nn.Conv1d:
        return nn.Conv1d(width, width, ratio, stride=ratio)

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        """See `Compression`."""
        y: Tensor = self.convolution(tokens.transpose(1, 2))
        return y.transpose(1, 2)


class Dilated(Convolution):
    """Convolution with dilation 2: it reads every second token, from the first one.

    The paper does not specify the dilated convolution. The kernel size c / 2, rounded up, is our choice.
    """

    @staticmethod
    def _convolution(width: int, ratio: int) -> nn.Conv1d:
        return nn.Conv1d(width, width, (ratio + 1) // 2, stride=ratio, dilation=2)


class MostUsed(Compression):
    """Selection of the tokens that receive the most attention, a fraction 1 / c of them."""

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        """See `Compression`."""
        return most_used(tokens, usage(tokens), tokens.shape[1] // self.ratio)


def most_used(tokens: Tensor, usage: Tensor, kept: int) -> Tensor:
    """Select the ``kept`` tokens of (N, L, C) with the largest usage (N, L), in temporal order."""
    chosen = usage.topk(kept, dim=1).indices.sort(dim=1).values
    return tokens.gather(1, chosen[..., None].expand(-1, -1, tokens.shape[2]))


def content_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Compute ``softmax(q k / sqrt(D)) v``, content-based attention without position encoding.

    Args:
        q: queries, (B, H, Tq, D).
        k: keys, (B, H, Tk, D).
        v: values, (B, H, Tk, V).
        seen: attention mask (B, Tq, Tk) bool with at least one key per query; None for no mask.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if seen is None else seen[:, None])


def attention_received(q: Tensor, k: Tensor) -> Tensor:
    """Return the mean attention that each of L tokens receives: q, k (N, H, L, D) -> (N, L)."""
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
    return weights.mean(dim=(1, 2))


COMPRESSIONS: dict[Method, type[Compression]] = {
    "mean": Mean,
    "max": Max,
    "convolution": Convolution,
    "dilated": Dilated,
    "most-used": MostUsed,
}
"""Compression modules by name."""


def compression(method: Method, width: int, ratio: int) -> Compression:
    """Build the module of a compression method."""
    return COMPRESSIONS[method](width, ratio)
