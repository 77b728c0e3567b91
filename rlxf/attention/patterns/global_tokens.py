"""Patterns with global tokens, which see all tokens and are seen by all."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlxf.attention.global_attention import build_etc_attention, build_longformer_attention
from rlxf.attention.patterns.base import (
    UNLIMITED,
    Either,
    NoGlobalTokens,
    Pattern,
    positions_between,
    positions_near,
)
from rlxf.attention.technique import AttentionFactory
from rlxf.attention.token_index import TokenIndex
from rlxf.attention.validation import check_int


class GlobalTokens(Pattern):
    """Pattern with global tokens: the first ``global_tokens`` positions see all and are seen by all.

    Global tokens have separate projections. With ``farthest``, no token sees one farther away: as for an
    agent with a memory of that length.
    """

    global_tokens: int
    farthest: int | None

    @property
    @abstractmethod
    def local(self) -> Pattern:
        """Pattern of the tokens that are not global among themselves."""

    @property
    def far(self) -> int:
        """Distance, in tokens, beyond which no token sees another."""
        return UNLIMITED if self.farthest is None else self.farthest

    @property
    def max_distance(self) -> int:
        """Equal to `far`."""
        return self.far

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether i or j is global and their distance is at most `far`, or `local` allows the pair."""
        either = (i < self.global_tokens) | (j < self.global_tokens)
        return (either & ((i - j).abs() <= self.far)) | self.local.mask_mod(i, j)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        others, globals_ = self.query_rules
        return tuple(Either(pattern, globals_) for pattern in others.for_heads(heads))

    @property
    def query_rules(self) -> tuple[Pattern, Pattern]:
        """Rule of the tokens that are not global, and rule of the global tokens."""
        others = LocalQueries(self.global_tokens, self.far, self.local)
        return others, GlobalQueries(self.global_tokens, self.far)

    def within(self, window: Pattern) -> Pattern:
        """Return this pattern with the window's distance as `farthest`."""
        options: Any = self
        limited: Pattern = replace(options, farthest=window.max_distance)
        return limited

    def attention_class(self, default: AttentionFactory) -> AttentionFactory:
        """Return the constructor of attention with separate projections for global queries."""
        return partial(build_longformer_attention, self.global_tokens)


class ExtraTokens(GlobalTokens):
    """Pattern with extra global tokens and separate keys and values for global and other tokens.

    Global tokens and other tokens each have their own queries and outputs, and each project the keys and
    values of both: four pairs of projections. One softmax covers all keys of a query.

    In a bidirectional transformer the global tokens are extra learned vectors. They have the positions 0 to g
    - 1 of each episode, and the tokens of the episode follow them. In a causal transformer they would see
    either nothing or later tokens. There the first g tokens of an episode are the global ones; this form is
    ours.
    """

    def attention_class(self, default: AttentionFactory) -> AttentionFactory:
        """Return the constructor of attention with four pairs of projections."""
        return partial(build_etc_attention, self.global_tokens)

    def build_global_tokens(self, width: int, causal: bool) -> NoGlobalTokens:
        """Return the learned vectors of a bidirectional transformer; none for a causal one."""
        return NoGlobalTokens() if causal else LearnedGlobalTokens(self.global_tokens, width)


@dataclass(frozen=True)
class LocalQueries(Pattern):
    """Keys visible to tokens that are not global: global tokens within distance ``far``, and local ones."""

    global_tokens: int
    far: int
    local: Pattern

    @property
    def max_distance(self) -> int:
        """The larger of ``far`` and the local distance."""
        return max(self.far, self.local.max_distance)

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        is_global = (j < self.global_tokens) & ((i - j).abs() <= self.far)
        return (i >= self.global_tokens) & (is_global | self.local.mask_mod(i, j))

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        return tuple(
            LocalQueries(self.global_tokens, self.far, pattern) for pattern in self.local.for_heads(heads)
        )

    def group(self, i: Tensor) -> Tensor:
        """Return local groups; global tokens, which see nothing here, form a group of their own."""
        return torch.where(i < self.global_tokens, -1, self.local.group(i))

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        queries = i[i >= self.global_tokens]
        if not len(queries):
            return positions[:0]
        first = positions_between(max(0, int(queries.min()) - self.far), self.global_tokens - 1, positions)
        return torch.cat([first, self.local.candidate_keys(queries, positions)]).unique()


@dataclass(frozen=True)
class GlobalQueries(Pattern):
    """Keys visible to global tokens: all within distance ``far``."""

    global_tokens: int
    far: int

    @property
    def max_distance(self) -> int:
        """Equal to ``far``."""
        return self.far

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        return (i < self.global_tokens) & ((i - j).abs() <= self.far)

    def group(self, i: Tensor) -> Tensor:
        """Return groups of global tokens; the other tokens, which see nothing here, form one group."""
        return torch.where(i < self.global_tokens, super().group(i), -1)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        queries = i[i < self.global_tokens]
        return positions_near(queries, self.far, positions) if len(queries) else positions[:0]


class LearnedGlobalTokens(NoGlobalTokens):
    """Learned embeddings (g, C) at positions 0 to g - 1 of each episode; its own tokens shift by g positions.

    Args:
        count: number of global tokens g per episode.
        width: features of a token C.
    """

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width))

    def index(self, index: TokenIndex) -> TokenIndex:
        """Return the index of all tokens. Rows with fewer episodes than others get empty slots."""
        count, episode = self.weight.shape[0], index.episodes
        position = torch.arange(count, device=episode.device).repeat(episode.shape[1])
        extra = TokenIndex(position.expand(len(episode), -1), episode.repeat_interleave(count, dim=1))
        return extra.concatenate(TokenIndex(index.position + count, index.episode))

    def forward(self, x: Tensor, index: TokenIndex) -> Tensor:
        """Prepend the global tokens to x (B, T, C); ``index`` (B, E + T) is the index of all tokens."""
        extra = self.weight[index.position[:, : index.shape[1] - x.shape[1]]]
        return torch.cat([extra.to(x.dtype), x], dim=1)

    def trim_last_layer(self, layer: Any) -> None:
        """Remove the attention of global queries."""
        layer.attention = layer.attention.others


def check_global_tokens(pattern: GlobalTokens) -> None:
    """Raise TypeError or ValueError unless the number of global tokens and the bound are in range."""
    name = type(pattern).__name__
    check_int(f"{name} global_tokens", pattern.global_tokens)
    if pattern.farthest is not None:
        check_int(f"{name} farthest", pattern.farthest)
