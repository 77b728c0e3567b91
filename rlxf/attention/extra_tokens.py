"""Learned tokens that stand before the tokens of each episode."""

import torch
from torch import Tensor, nn

from rlxf.attention.index import Index


class NoExtraTokens(nn.Module):
    """Tokens stay as they are."""

    def index(self, index: Index) -> Index:
        """Where all tokens stand, extra ones first."""
        return index

    def forward(self, x: Tensor, index: Index) -> Tensor:
        """Tokens x (B, T, C) behind the extra ones, of which ``index`` (B, E + T) tells."""
        return x


class LearnedTokens(NoExtraTokens):
    """g vectors (g, C) at the positions 0 to g - 1 of each episode; its own tokens stand g positions later.

    Args:
        count: g.
        width: features of a token C.
    """

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width))

    def index(self, index: Index) -> Index:
        """See `NoExtraTokens`. Rows with fewer episodes than others have empty slots."""
        count, episode = self.weight.shape[0], index.episodes
        position = torch.arange(count, device=episode.device).repeat(episode.shape[1])
        extra = Index(position.expand(len(episode), -1), episode.repeat_interleave(count, dim=1))
        return extra.concatenate(Index(index.position + count, index.episode))

    def forward(self, x: Tensor, index: Index) -> Tensor:
        """See `NoExtraTokens`."""
        extra = self.weight[index.position[:, : index.shape[1] - x.shape[1]]]
        return torch.cat([extra.to(x.dtype), x], dim=1)
