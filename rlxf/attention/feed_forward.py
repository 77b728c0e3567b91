"""The position-wise feed-forward sublayer."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rlxf.attention.init import orthogonal_linear

Activation = Literal["relu", "gelu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activation functions by name. They may modify their input in place."""


class FeedForward(nn.Module):
    """Position-wise feed-forward network: ``W_2 activation(W_1 x)``, with biases.

    The hidden activations are the largest tensor of a layer, so they are computed in place.

    With ``chunk``, tokens are processed in chunks with gradient checkpointing: the hidden activations exist
    for one chunk at a time, and backward recomputes them. The results are the same. Without checkpointing,
    autograd would keep the hidden activations of all chunks.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.3; GELU: Hendrycks and Gimpel 2016,
    arXiv:1606.08415; chunks: Kitaev et al. 2020, arXiv:2001.04451, section 3.

    Args:
        width: features of a token C.
        inner: hidden features F.
        activation: "relu"; "gelu", as in BERT; or "gelu_tanh", its approximation in GPT-2.
        chunk: tokens per chunk; None processes all tokens at once.
    """

    def __init__(self, width: int, inner: int, activation: Activation, chunk: int | None = None):
        super().__init__()
        self.chunk = chunk
        self.inner = orthogonal_linear(width, inner)
        self.outer = orthogonal_linear(inner, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        if self.chunk is None or x.shape[1] <= self.chunk:
            return self.transform(x)
        parts = [checkpoint(self.transform, part, use_reentrant=False) for part in x.split(self.chunk, dim=1)]
        return torch.cat(parts, dim=1)

    def transform(self, x: Tensor) -> Tensor:
        """Apply the network to all tokens at once: x (B, T, C) -> (B, T, C)."""
        hidden = (x.flatten(0, -2) @ self.inner.weight.T).add_(self.inner.bias)
        y: Tensor = self.outer(self.activation(hidden))
        return y.view_as(x)
