"""Projections of `Linformer`: few summaries of blocks of many positions."""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

Method = Literal["learned", "convolution", "mean", "max"]
"""Names of the projections; see `PROJECTIONS`."""


class Projection(nn.Module, ABC):
    """Projection of N blocks of n positions, which may lack tokens, to k summaries each.

    Args:
        group_size: number of adjacent positions per summary; 1 if the projection is learned.
    """

    def __init__(self, group_size: int):
        super().__init__()
        self.group_size = group_size

    def forward(self, x: Tensor, filled: Tensor) -> Tensor:
        """Compute the summaries; by default `linear_summaries`.

        Args:
            x: (B, N, n, H, D), 0 where there is no token.
            filled: (B, N, n) bool, True where there is a token.

        Returns:
            (B, H, N k, D).
        """
        return self.linear_summaries(x, filled)

    @abstractmethod
    def linear_summaries(self, x: Tensor, filled: Tensor) -> Tensor:
        """Return the summaries without bias and nonlinearity; arguments as in `forward`.

        For one-hot x they are the fraction of each token in each summary.
        """

    @abstractmethod
    def nonempty(self, filled: Tensor) -> Tensor:
        """Return whether each summary includes a token: (B, N, n) -> (B, N, k) bool."""


class LearnedProjection(Projection):
    """Learned projection ``E x + b``.

    The weight (h, n, k) is E transposed, for each head or one for all heads; the bias (h, k) is optional. The
    rows of each E are initially orthonormal.
    """

    def __init__(self, length: int, summaries: int, heads: int, size: int, bias: bool):
        super().__init__(1)
        self.weight = _orthogonal(heads, length, summaries)
        self.bias = nn.Parameter(torch.zeros(heads, summaries)) if bias else None

    def forward(self, x: Tensor, filled: Tensor) -> Tensor:
        y = self.linear_summaries(x, filled)
        return y if self.bias is None else y + self.bias.repeat(1, x.shape[1])[..., None]

    def linear_summaries(self, x: Tensor, filled: Tensor) -> Tensor:
        weight = self.weight[:, : x.shape[2]]
        if len(weight) == 1:
            return torch.einsum("nk,bmnhd->bhmkd", weight[0], x).flatten(2, 3)
        return torch.einsum("hnk,bmnhd->bhmkd", weight, x).flatten(2, 3)

    def nonempty(self, filled: Tensor) -> Tensor:
        return filled.any(-1, keepdim=True).expand(-1, -1, self.weight.shape[2])


class MeanPooling(Projection):
    """Mean of the tokens of each group of n / k positions."""

    def __init__(self, length: int, summaries: int, heads: int, size: int, bias: bool):
        super().__init__(length // summaries)

    def groups(self, x: Tensor) -> Tensor:
        """Split each block into groups: (B, N, n, ...) -> (B, N, k, n / k, ...)."""
        return x.unflatten(2, (-1, self.group_size))

    def linear_summaries(self, x: Tensor, filled: Tensor) -> Tensor:
        """Return the mean of each group.

        `MaxPooling` and `ConvolutionProjection`, in which a token has no exact share, use it too.
        """
        count = self.groups(filled).sum(3).clamp(min=1)[..., None, None]
        return _by_head(self.groups(x).sum(3) / count)

    def nonempty(self, filled: Tensor) -> Tensor:
        return self.groups(filled).any(3)


class MaxPooling(MeanPooling):
    """Maximum over the tokens of each group, feature by feature."""

    def forward(self, x: Tensor, filled: Tensor) -> Tensor:
        largest = self.groups(x.masked_fill(~filled[..., None, None], -torch.inf)).amax(3)
        return _by_head(largest.masked_fill(~self.nonempty(filled)[..., None, None], 0.0))


class ConvolutionProjection(MeanPooling):
    """Convolution ``sum_t W_t x_t + b`` over each group, with kernel and stride n / k.

    weight (h, D, D, n / k), for each head or one for all heads, is laid out as in torch's Conv1d; bias (h,
    D).
    """

    def __init__(self, length: int, summaries: int, heads: int, size: int, bias: bool):
        super().__init__(length, summaries, heads, size, bias)
        self.weight = _orthogonal(heads, size, size, self.group_size)
        self.bias = nn.Parameter(torch.zeros(heads, size)) if bias else None

    def forward(self, x: Tensor, filled: Tensor) -> Tensor:
        weight = self.weight.expand(x.shape[3], -1, -1, -1)
        y = torch.einsum("hoit,bmpthi->bhmpo", weight, self.groups(x)).flatten(2, 3)
        return y if self.bias is None else y + self.bias[:, None]


def _orthogonal(heads: int, *shape: int) -> nn.Parameter:
    """Return a parameter (heads, *shape) with an orthogonal matrix for each head."""
    weight = torch.empty(heads, *shape)
    for matrix in weight:
        nn.init.orthogonal_(matrix)
    return nn.Parameter(weight)


def _by_head(x: Tensor) -> Tensor:
    """Rearrange summaries (B, N, k, H, D) to (B, H, N k, D)."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


PROJECTIONS: dict[Method, type[LearnedProjection] | type[MeanPooling]] = {
    "learned": LearnedProjection,
    "convolution": ConvolutionProjection,
    "mean": MeanPooling,
    "max": MaxPooling,
}
"""Projection classes by method."""
