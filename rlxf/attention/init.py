"""Linear layers with orthogonal initialization."""

import torch
from torch import nn


def stacked_orthogonal(matrices: int, rows: int, columns: int) -> nn.Parameter:
    """Create a parameter (matrices * rows, columns) of stacked matrices, each initialized orthogonally.

    torch's default initialization of Linear scales a projection down by sqrt(3), which weakens the
    signal that gated residuals pass to memory. Orthogonal matrices preserve its norm.
    """
    weight = torch.empty(matrices, rows, columns)
    for matrix in weight:
        nn.init.orthogonal_(matrix)
    return nn.Parameter(weight.flatten(0, 1))


def orthogonal_linear(columns: int, rows: int, matrices: int = 1, bias: bool = True) -> nn.Linear:
    """Create one Linear of ``matrices`` stacked projections from ``columns`` to ``rows`` features; bias 0."""
    linear = nn.Linear(columns, matrices * rows, bias=bias)
    linear.weight = stacked_orthogonal(matrices, rows, columns)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
