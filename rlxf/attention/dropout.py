"""Dropout with few random numbers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PROBABILITY_LEVELS = 2**16
"""Resolution of probabilities on CPU: each entry uses 16 bits, so a 64-bit random number serves four."""


class Dropout(nn.Module):
    """Module form of `dropout`; the identity in evaluation mode.

    Args:
        probability: probability of setting a feature to 0, in [0, 1).
    """

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x of any shape."""
        return dropout(x, self.probability) if self.training else x


def dropout(x: Tensor, probability: float) -> Tensor:
    """Compute ``x m / (1 - p)``, where each entry of m is independently 0 with probability p, else 1.

    Random numbers come from torch's global generator. On CPU torch's own dropout is several times slower:
    it takes as long as a matrix product.

    Source: Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting".

    Args:
        x: tensor of any shape.
        probability: p, in [0, 1). On CPU p is rounded to a multiple of 2^-16, both in m and in the scale.
    """
    if not probability:
        return x
    return x * _scales(x, probability) if x.device.type == "cpu" else F.dropout(x, probability)


def _scales(x: Tensor, probability: float) -> Tensor:
    """Sample the factor of each entry of x: 0 or ``1 / (1 - p)``."""
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
    dropped = min(round(PROBABILITY_LEVELS * probability), PROBABILITY_LEVELS - 1)
    kept = torch.ge(numbers, dropped - PROBABILITY_LEVELS // 2, out=torch.empty(x.shape, dtype=x.dtype))
    return kept.mul_(PROBABILITY_LEVELS / (PROBABILITY_LEVELS - dropped))
