"""The position-wise feed-forward sublayer."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.linear import orthogonal_linear

Activation = Literal["relu", "gelu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class FeedForward(nn.Module):
    """``W_2 activation(W_1 x)``, with biases.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.3; GELU: Radford et al. 2018.

    Args:
        width: features of a token C.
        inner: features in between F.
        activation: "relu" or "gelu".
    """

    def __init__(self, width: int, inner: int, activation: Activation):
        super().__init__()
        self.inner = orthogonal_linear(width, inner)
        self.outer = orthogonal_linear(inner, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        y: Tensor = self.outer(self.activation(self.inner(x)))
        return y
