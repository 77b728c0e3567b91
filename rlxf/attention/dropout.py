"""Dropout, with random numbers that are cheap to draw."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS = 2**16
"""Probabilities are multiples of 1 / LEVELS on CPU: a 64-bit random number is good for four entries."""


class Dropout(nn.Module):
    """`dropout` in training; x as it is in evaluation.

    Args:
        probability: of setting a feature to 0, in [0, 1).
    """

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """x (...) -> (...)."""
        return dropout(x, self.probability) if self.training else x


def dropout(x: Tensor, probability: float) -> Tensor:
    """``x m / (1 - p)`` with m 0 with probability p, else 1, for each entry by itself.

    Drawn from torch's global generator. On CPU torch's own takes several times longer, as long as a product
    of x with a matrix.

    Source: Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting".

    Args:
        x: of any shape.
        probability: p, in [0, 1). On CPU the nearest multiple of 2^-16 counts in both places.
    """
    if not probability:
        return x
    return x * _scales(x, probability) if x.device.type == "cpu" else F.dropout(x, probability)


def _scales(x: Tensor, probability: float) -> Tensor:
    """0 or ``1 / (1 - p)`` for each entry of x."""
    words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
    dropped = min(round(LEVELS * probability), LEVELS - 1)
    kept = torch.ge(numbers, dropped - LEVELS // 2, out=torch.empty(x.shape, dtype=x.dtype))
    return kept.mul_(LEVELS / (LEVELS - dropped))
