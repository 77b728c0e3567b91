"""Feed-forward networks of a layer."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rlxf.attention.linear import TokenFunction, bound, cast, is_plain, keep_matmul_dtype, orthogonal_linear

Activation = Literal["relu", "gelu", "gelu_tanh", "swiglu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,
}
"""Activation functions by name. They may modify their input in place."""


def default_inner_width(width: int, activation: Activation) -> int:
    """Return the hidden features F of a feed-forward sublayer of C features: 4 C, with "swiglu" 8 C / 3.

    A gated sublayer has three matrices instead of two. With 2/3 of the hidden features, rounded down, it has
    the same number of parameters as the ungated one (Shazeer 2020, arXiv:2002.05202, section 3).
    """
    return 8 * width // 3 if activation == "swiglu" else 4 * width


class FeedForward(nn.Module):
    """Position-wise feed-forward network: ``W_2 activation(W_1 x)``, with biases.

    The hidden activations are the largest tensor of a layer, so the bias and a ReLU are applied in place.

    With ``chunk``, tokens are processed in chunks with gradient checkpointing: the hidden activations exist
    for one chunk at a time, and backward recomputes them. The results are the same. Without checkpointing,
    autograd would keep the hidden activations of all chunks.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.3; GELU: Hendrycks and Gimpel 2016,
    arXiv:1606.08415; chunks: Kitaev et al. 2020, arXiv:2001.04451, section 3.

    Args:
        width: features of a token C.
        inner: hidden features F.
        activation: "relu"; "gelu", as in BERT; or "gelu_tanh", its approximation in GPT-2. For "swiglu" see
            `SwiGLU`.
        chunk: tokens per chunk; None processes all tokens at once.
    """

    inner_matrices = 1

    def __init__(self, width: int, inner: int, activation: Activation, chunk: int | None = None):
        super().__init__()
        self.chunk = chunk
        self.inner = orthogonal_linear(width, inner, self.inner_matrices)
        self.outer = orthogonal_linear(inner, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to x (B, T, C), in chunks if they are set -> (B, T, C)."""
        if self.chunk is None or x.shape[1] <= self.chunk:
            return self.transform(x)
        transform = keep_matmul_dtype(self.transform)
        parts = [checkpoint(transform, part, use_reentrant=False) for part in x.split(self.chunk, dim=1)]
        return torch.cat(parts, dim=1)

    def transform(self, x: Tensor) -> Tensor:
        """Apply the network to all tokens at once: x (B, T, C) -> (B, T, C)."""
        if not is_plain(self.inner):
            hidden = self.inner(x).clone()  # which the activation may change in place
            adapted: Tensor = self.outer(self.activation(hidden))
            return adapted
        hidden = (cast(x.flatten(0, -2)) @ cast(self.inner.weight).T).add_(self.inner.bias)
        y: Tensor = self.outer(self.activation(hidden))
        return y.view_as(x).to(x.dtype)

    def bind(self) -> TokenFunction:
        """Return `transform` as a `bound` function."""
        if not is_plain(self.inner):
            return self.transform
        weight = self.inner.weight
        bias = self.inner.bias
        activation = self.activation
        outer = bound(self.outer)
        return lambda x: outer(activation((x @ weight.T).add_(bias)))


class SwiGLU(FeedForward):
    """Gated feed-forward network: ``W_2 (silu(W_g x) * W_1 x)``, elementwise ``*``, with biases.

    ``inner`` (2 F, C) holds W_g, then W_1. Biases start at 0; the paper has none.

    Arguments are those of `FeedForward`; for ``inner`` see `default_inner_width`.

    Source: Shazeer 2020, arXiv:2002.05202, equation 6.
    """

    inner_matrices = 2

    def transform(self, x: Tensor) -> Tensor:
        gate, value = self.inner(x).chunk(2, dim=-1)
        y: Tensor = self.outer(self.activation(gate) * value)
        return y

    def bind(self) -> TokenFunction:
        return self.transform


def build_feed_forward(width: int, inner: int, activation: Activation, chunk: int | None) -> FeedForward:
    """Build the feed-forward network of an activation. Arguments are those of `FeedForward`."""
    kind = SwiGLU if activation == "swiglu" else FeedForward
    return kind(width, inner, activation, chunk)
