"""Parts that mixers with matrix states share: heads, normalized outputs and short convolutions."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.recurrent.base import EpisodeRuns
from rlxf.attention.recurrent.scan import causal_convolution

NORM_EPSILON = 1e-6


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Split features (B, T, H D) into heads (B, T, H, D)."""
    return x.unflatten(-1, (heads, -1))


def rms_norm(x: Tensor) -> Tensor:
    """Divide x (..., D) by the root of the mean of its squares, without weights."""
    return F.rms_norm(x, x.shape[-1:], eps=NORM_EPSILON)


def unit_norm(x: Tensor) -> Tensor:
    """Divide x (..., D) by its Euclidean norm; 0 stays 0. The result has at least the precision of float32.

    In bfloat16, a norm may exceed 1 by 0.2%, and a state that a key divides by its norm may grow.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * (wide.square().sum(dim=-1, keepdim=True) + NORM_EPSILON).rsqrt()


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over the last W tokens of an episode, followed by SiLU.

    Args:
        channels: features C.
        taps: window W, including the current token.
    """

    def __init__(self, channels: int, taps: int):
        super().__init__()
        bound = taps**-0.5
        self.weight = nn.Parameter(torch.empty(channels, taps).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels))

    def initial_window(self, batch: int) -> Tensor:
        """Return the window before the first token of an episode, (B, W - 1, C)."""
        channels, taps = self.weight.shape
        return self.weight.new_zeros(batch, taps - 1, channels)

    def forward(self, x: Tensor, runs: EpisodeRuns, window: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (B, T, C) for x (B, T, C), and the window after the last token."""
        y, window = causal_convolution(x, self.weight, self.bias, runs, window)
        return F.silu(y), window
