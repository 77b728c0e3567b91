"""Ways to make few summaries of the tokens along a stretch of positions."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Projection(nn.Module, ABC):
    """Summaries of N stretches of n positions, which may lack tokens.

    Args:
        piece: n is a multiple of it.
    """

    def __init__(self, piece: int):
        super().__init__()
        self.piece = piece

    @abstractmethod
    def forward(self, x: Tensor, filled: Tensor) -> Tensor:
        """The summaries.

        Args:
            x: (B, N, n, H, D), 0 where there is no token.
            filled: (B, N, n) bool, where there is one.

        Returns:
            (B, H, N k, D).
        """

    @abstractmethod
    def look(self, x: Tensor, filled: Tensor) -> Tensor:
        """What each token has in the summaries, of one-hot x; as `forward`."""

    @abstractmethod
    def something(self, filled: Tensor) -> Tensor:
        """(B, N, n) -> (B, N, k) bool: whether a summary is of any token."""


class Learned(Projection):
    """``E x + b``: weight (h, n, k) is E, transposed, for each head, or one for all; bias (h, k) on request.

    Each column starts with length 1, at right angles to the others.
    """

    def __init__(self, length: int, summaries: int, heads: int, size: int, bias: bool):
        super().__init__(1)
        self.weight = orthogonal(heads, length, summaries)
        self.bias = nn.Parameter(torch.zeros(heads, summaries)) if bias else None

    def forward(self, x: Tensor, filled: Tensor) -> Tensor:
        """See `Projection`."""
        y = self.look(x, filled)
        return y if self.bias is None else y + self.bias.repeat(1, x.shape[1])[..., None]

    def look(self, x: Tensor, filled: Tensor) -> Tensor:
        """See `Projection`."""
        weight = self.weight[:, : x.shape[2]]
        if len(weight) == 1:
            return torch.einsum("nk,bmnhd->bhmkd", weight[0], x).flatten(2, 3)
        return torch.einsum("hnk,bmnhd->bhmkd", weight, x).flatten(2, 3)

    def something(self, filled: Tensor) -> Tensor:
        """See `Projection`."""
        return filled.any(-1, keepdim=True).expand(-1, -1, self.weight.shape[2])


class Mean(Projection):
    """The mean of the tokens of each piece of n / k positions."""

    def __init__(self, length: int, summaries: int, heads: int, size: int, bias: bool):
        super().__init__(length // summaries)

    def pieces(self, x: Tensor) -> Tensor:
        """(B, N, n, ...) -> (B, N, k, n / k, ...)."""
        return x.unflatten(2, (-1, self.piece))

    def forward(self, x: Tensor, filled: Tensor) -> Tensor:
        """See `Projection`."""
        return self.look(x, filled)

    def look(self, x: Tensor, filled: Tensor) -> Tensor:
        """See `Projection`. What no sum of tokens makes is shared evenly among them."""
        count = self.pieces(filled).sum(3).clamp(min=1)[..., None, None]
        return by_head(self.pieces(x).sum(3) / count)

    def something(self, filled: Tensor) -> Tensor:
        """See `Projection`."""
        return self.pieces(filled).any(3)


class Max(Mean):
    """The largest of the tokens of each piece, feature by feature."""

    def forward(self, x: Tensor, filled: Tensor) -> Tensor:
        """See `Projection`."""
        largest = self.pieces(x.masked_fill(~filled[..., None, None], -torch.inf)).amax(3)
        return by_head(largest.masked_fill(~self.something(filled)[..., None, None], 0.0))


class Convolution(Mean):
    """``sum_t W_t x_t + b`` over each piece: a convolution whose kernel and stride are n / k.

    weight (h, D, D, n / k), for each head or one for all, is laid out as in torch's Conv1d; bias (h, D).
    """

    def __init__(self, length: int, summaries: int, heads: int, size: int, bias: bool):
        super().__init__(length, summaries, heads, size, bias)
        self.weight = orthogonal(heads, size, size, self.piece)
        self.bias = nn.Parameter(torch.zeros(heads, size)) if bias else None

    def forward(self, x: Tensor, filled: Tensor) -> Tensor:
        """See `Projection`."""
        weight = self.weight.expand(x.shape[3], -1, -1, -1)
        y = torch.einsum("hoit,bmpthi->bhmpo", weight, self.pieces(x)).flatten(2, 3)
        return y if self.bias is None else y + self.bias[:, None]


def orthogonal(heads: int, *shape: int) -> nn.Parameter:
    """(heads, *shape): for each head a matrix, orthogonal by itself."""
    weight = torch.empty(heads, *shape)
    for matrix in weight:
        nn.init.orthogonal_(matrix)
    return nn.Parameter(weight)


def by_head(x: Tensor) -> Tensor:
    """(B, N, k, H, D) -> (B, H, N k, D)."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


PROJECTIONS: dict[str, type[Learned] | type[Mean]] = {
    "learned": Learned,
    "convolution": Convolution,
    "mean": Mean,
    "max": Max,
}
"""By the name of the method."""
