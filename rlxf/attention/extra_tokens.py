"""Learned global tokens that precede the tokens of each episode."""

import torch
from torch import Tensor, nn

from rlxf.attention.index import Index


class NoExtraTokens(nn.Module):
    """No global tokens: the sequence is unchanged."""

    def index(self, index: Index) -> Index:
        """Return the index of all tokens, global tokens first."""
        return index

    def forward(self, x: Tensor, index: Index) -> Tensor:
        """Prepend the global tokens to x (B, T, C); ``index`` (B, E + T) is the index of all tokens."""
        return x


class LearnedTokens(NoExtraTokens):
    """Learned embeddings (g, C) at positions 0 to g - 1 of each episode; its own tokens shift by g positions.

    Args:
        count: number of global tokens g per episode.
        width: features of a token C.
    """

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width))

    def index(self, index: Index) -> Index:
        """Return the index of all tokens. Rows with fewer episodes than others get empty slots."""
        count, episode = self.weight.shape[0], index.episodes
        position = torch.arange(count, device=episode.device).repeat(episode.shape[1])
        extra = Index(position.expand(len(episode), -1), episode.repeat_interleave(count, dim=1))
        return extra.concatenate(Index(index.position + count, index.episode))

    def forward(self, x: Tensor, index: Index) -> Tensor:
        """See `NoExtraTokens`."""
        extra = self.weight[index.position[:, : index.shape[1] - x.shape[1]]]
        return torch.cat([extra.to(x.dtype), x], dim=1)
