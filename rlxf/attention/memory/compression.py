"""Ways to make one token of several: the compression functions of a Compressive Transformer."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

Method = Literal["mean", "max", "convolution", "dilated", "most-used"]

Usage = Callable[[Tensor], Tensor]
"""Tokens (N, L, C) of N stretches -> how much attention each of them gets, (N, L)."""


class Compression(nn.Module, ABC):
    """Takes c tokens together to one.

    Args:
        width: features of a token C.
        ratio: c.
    """

    def __init__(self, width: int, ratio: int):
        super().__init__()
        self.ratio = ratio

    @abstractmethod
    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        """Tokens (N, L, C), oldest first, L a multiple of c -> (N, L / c, C)."""


class Mean(Compression):
    """Their mean."""

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        """See `Compression`."""
        return tokens.unflatten(1, (-1, self.ratio)).mean(2)


class Max(Compression):
    """The largest of them, feature by feature."""

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        """See `Compression`."""
        return tokens.unflatten(1, (-1, self.ratio)).amax(2)


class Convolution(Compression):
    """``sum_t W_t x_t + b``: a convolution over time whose kernel and stride are c.

    The rows of W start orthogonal: what it makes of tokens of unit variance has unit variance.
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
    """The same with every second token, the first one included: dilation 2.

    The paper says no more than "dilated"; for one token out of c, this kernel of c / 2, rounded up, is ours.
    """

    @staticmethod
    def _convolution(width: int, ratio: int) -> nn.Conv1d:
        return nn.Conv1d(width, width, (ratio + 1) // 2, stride=ratio, dilation=2)


class MostUsed(Compression):
    """Those tokens that get the most attention, one of c."""

    def forward(self, tokens: Tensor, usage: Usage) -> Tensor:
        """See `Compression`."""
        return most_used(tokens, usage(tokens), tokens.shape[1] // self.ratio)


def most_used(tokens: Tensor, usage: Tensor, kept: int) -> Tensor:
    """Of tokens (N, L, C) those with the largest usage (N, L), in the order of time: (N, kept, C)."""
    chosen = usage.topk(kept, dim=1).indices.sort(dim=1).values
    return tokens.gather(1, chosen[..., None].expand(-1, -1, tokens.shape[2]))


def content_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """``softmax(q k / sqrt(D)) v``, by content alone: positions have no part in it.

    Args:
        q: (B, H, Tq, D).
        k: (B, H, Tk, D).
        v: (B, H, Tk, V).
        seen: (B, Tq, Tk) bool, which keys a query sees, at least one; None for all.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if seen is None else seen[:, None])


def attention_received(q: Tensor, k: Tensor) -> Tensor:
    """What L tokens get of each other's attention, on average: q, k (N, H, L, D) -> (N, L)."""
    weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
    return weights.mean(dim=(1, 2))


COMPRESSIONS: dict[Method, type[Compression]] = {
    "mean": Mean,
    "max": Max,
    "convolution": Convolution,
    "dilated": Dilated,
    "most-used": MostUsed,
}
"""By the name of the method."""


def compression(method: Method, width: int, ratio: int) -> Compression:
    """The module of a method."""
    return COMPRESSIONS[method](width, ratio)
