"""Linear layers that start orthogonal."""

import torch
from torch import nn


def stacked(matrices: int, rows: int, columns: int) -> nn.Parameter:
    """Matrices on top of one another, (matrices * rows, columns), each of them orthogonal.

    torch's default for a Linear layer shrinks a projection by sqrt(3): gates then starve the
    memory of signal. Orthogonal ones keep its length.
    """
    weight = torch.empty(matrices, rows, columns)
    for matrix in weight:
        nn.init.orthogonal_(matrix)
    return nn.Parameter(weight.flatten(0, 1))


def orthogonal_linear(columns: int, rows: int, matrices: int = 1, bias: bool = True) -> nn.Linear:
    """``matrices`` projections of ``columns`` to ``rows`` features in one Linear; bias 0."""
    linear = nn.Linear(columns, matrices * rows, bias=bias)
    linear.weight = stacked(matrices, rows, columns)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
