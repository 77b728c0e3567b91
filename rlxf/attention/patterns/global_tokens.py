"""Patterns with global tokens, which attend to all tokens, and all to them (Longformer, ETC, BigBird-ETC)."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rlxf.attention.patterns.base import (
    UNLIMITED,
    Either,
    NoGlobalTokens,
    Pattern,
    positions_between,
    positions_near,
)
from rlxf.attention.patterns.global_attention import (
    GlobalPositions,
    build_etc_attention,
    build_longformer_attention,
    is_global,
    number_of_kind,
)
from rlxf.attention.technique import AttentionFactory, SpecView
from rlxf.attention.token_index import TokenIndex
from rlxf.utils.checks import check_choice, check_int

GlobalInput = Literal["learned", "given"]
"""Global tokens of a bidirectional transformer: extra learned vectors, or the first tokens of an episode."""


def checked_positions(
    positions: Sequence[int], option: str = "global_tokens", noun: str = "position"
) -> tuple[int, ...]:
    """Check the given positions of global tokens, or numbers of blocks, and return them in ascending order.

    Args:
        positions: the positions.
        option: name of the option.
        noun: word for a position.

    Raises:
        TypeError: if a position is not an int.
        ValueError: if there is none, or one is negative or given twice.
    """
    for position in positions:
        check_int(f"{noun} in {option}", position, least=0)
    if not positions or len(set(positions)) < len(positions):
        raise ValueError(f"{option} must be different {noun}s, at least one, got {positions}")
    return tuple(sorted(positions))


SegmentLengths = int | tuple[int, ...] | None
"""Segments of the tokens that are not global: their length, or the length of each; None for no segments."""


def checked_segments(name: str, value: Any) -> SegmentLengths:
    """Return an option of type `SegmentLengths` after checks; a list from JSON becomes a tuple.

    Raises:
        TypeError: if a length is not an int.
        ValueError: if a length is less than 1, or there is none.
    """
    if not isinstance(value, list | tuple):
        return None if value is None else checked_length(name, value)
    if not value:
        raise ValueError(f"{name} must be a length or a tuple of lengths, got {value}")
    return tuple(checked_length(name, length) for length in value)


def checked_length(name: str, value: Any) -> int:
    """Return a length of at least 1. Raises like `check_int`."""
    check_int(name, value)
    return int(value)


def segment_of(token: Tensor, segments: SegmentLengths) -> Tensor:
    """Return the segment of each token, counted from the first one that is not global.

    Tokens and segments are int64 of any shape; tokens without a segment have a negative number.
    """
    if segments is None:
        return torch.full_like(token, -1)
    if isinstance(segments, int):
        return token.div(segments, rounding_mode="floor")
    ends = torch.tensor(segments, device=token.device).cumsum(0)
    segment = torch.searchsorted(ends, token, right=True)
    return torch.where((token >= 0) & (segment < len(segments)), segment, -1)


class GlobalTokens(Pattern):
    """Pattern with global tokens, which attend to all tokens, and all tokens attend to them.

    They are the tokens at the first ``global_tokens`` positions, or at the positions in a tuple. Global
    tokens have separate projections. With ``farthest``, no token attends to a token farther away, as in an
    agent with a memory of that length.

    Raises:
        TypeError: if global_tokens or farthest is not an integer or, for the former, a tuple of integers.
        ValueError: if one of them is less than 1, or if a position is negative or given twice.
    """

    global_tokens: GlobalPositions
    farthest: int | None

    def __post_init__(self) -> None:
        name = type(self).__name__
        tokens = self.global_tokens
        if isinstance(tokens, list | tuple):
            object.__setattr__(self, "global_tokens", checked_positions(tokens))
        else:
            check_int(f"{name} global_tokens", tokens)
        if self.farthest is not None:
            check_int(f"{name} farthest", self.farthest)

    @property
    @abstractmethod
    def local(self) -> Pattern:
        """Pattern of the tokens that are not global among themselves, at most `max_distance` apart."""

    @property
    def max_distance(self) -> int:
        """Equal to ``farthest``, if it is not None."""
        return UNLIMITED if self.farthest is None else self.farthest

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        """Return whether a rule of `query_rules` allows the pair."""
        local, of_globals = self.query_rules
        return local.mask_mod(i, j) | of_globals.mask_mod(i, j)

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        local, of_globals = self.query_rules
        return tuple(Either(pattern, of_globals) for pattern in local.for_heads(heads))

    @property
    def query_rules(self) -> tuple[Pattern, Pattern]:
        """Rule of the tokens that are not global, and rule of the global tokens."""
        tokens = self.global_tokens
        far = self.max_distance
        return LocalQueries(tokens, far, self.local), GlobalQueries(tokens, far, self.own_segments)

    @property
    def own_segments(self) -> SegmentLengths:
        """Segments such that global token n attends to segment n only; by default none: it attends to all."""
        return None

    def within(self, distance: int) -> Pattern:
        """Return this pattern with the distance as `farthest`."""
        options: Any = self
        limited: Pattern = replace(options, farthest=distance)
        return limited

    def attention_class(self, default: AttentionFactory) -> AttentionFactory:
        """Return the constructor of attention with separate projections for global queries."""
        return partial(build_longformer_attention, self.global_tokens)


class ExtraTokens(GlobalTokens):
    """Pattern with extra global tokens and separate keys and values for global and other tokens.

    Global tokens and other tokens each have their own queries and outputs, and each project the keys and
    values of both: four pairs of projections. One softmax covers all keys of a query.

    In a bidirectional transformer the global tokens are extra learned vectors. They have the positions 0 to g
    - 1 of each episode, and the tokens of the episode follow them. In a causal transformer they would attend
    either to nothing or to later tokens. There the first g tokens of an episode are the global ones; this
    form is rlxf's variant.

    With ``global_input="given"`` the first g tokens of an episode are the global ones in a bidirectional
    transformer, too, and have outputs: this is the paper's global input, with one token for each sentence,
    for example. Where the global ones are tokens of the episode, ``global_tokens`` may list their positions.

    Raises:
        TypeError: like `GlobalTokens`.
        ValueError: like `GlobalTokens`, or if global_input is unknown; in a spec, if positions are listed for
            learned global tokens.
    """

    global_input: GlobalInput

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{type(self).__name__} global_input", self.global_input, get_args(GlobalInput))

    def check(self, choices: SpecView) -> None:
        """Raise ValueError if positions are listed and the global tokens are not tokens of the episode."""
        if not (isinstance(self.global_tokens, int) or choices.causal or self.global_input == "given"):
            raise ValueError(
                f"{self} lists positions of tokens, and with causal=False its global tokens are learned "
                f"vectors before the episode; set global_input='given' or "
                f"global_tokens={len(self.global_tokens)}"
            )

    def attention_class(self, default: AttentionFactory) -> AttentionFactory:
        """Return the constructor of attention with four pairs of projections."""
        return partial(build_etc_attention, self.global_tokens)

    def build_global_tokens(self, width: int, causal: bool) -> NoGlobalTokens:
        """Return the learned vectors of a bidirectional transformer; none if the input has the tokens."""
        if causal or self.global_input == "given":
            return NoGlobalTokens()
        assert isinstance(self.global_tokens, int)
        return LearnedGlobalTokens(self.global_tokens, width)


@dataclass(frozen=True)
class _QueryRule(Pattern):
    """Keys visible to one kind of query, up to distance ``far``."""

    global_tokens: GlobalPositions
    far: int

    @property
    def max_distance(self) -> int:
        """Equal to ``far``."""
        return self.far


@dataclass(frozen=True)
class GlobalQueries(_QueryRule):
    """Keys visible to global tokens: all within distance ``far``, or only those of their own segment."""

    segments: SegmentLengths = None

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        visible = is_global(i, self.global_tokens) & ((i - j).abs() <= self.far)
        if self.segments is None:
            return visible
        i, number = (number_of_kind(position, self.global_tokens) for position in (i, j))
        return visible & ((segment_of(number, self.segments) == i) | is_global(j, self.global_tokens))

    def group(self, i: Tensor) -> Tensor:
        """Return groups of global tokens; the other tokens, which attend to nothing here, form one group."""
        return torch.where(is_global(i, self.global_tokens), super().group(i), -1)

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        queries = i[is_global(i, self.global_tokens)]
        return positions_near(queries, self.far, positions) if len(queries) else positions[:0]


@dataclass(frozen=True)
class LocalQueries(_QueryRule):
    """Keys visible to tokens that are not global: global tokens within distance ``far``, and local ones."""

    local: Pattern

    def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
        global_key = is_global(j, self.global_tokens) & ((i - j).abs() <= self.far)
        return ~is_global(i, self.global_tokens) & (global_key | self.local.mask_mod(i, j))

    def for_heads(self, heads: int) -> tuple[Pattern, ...]:
        return tuple(replace(self, local=pattern) for pattern in self.local.for_heads(heads))

    def group(self, i: Tensor) -> Tensor:
        """Return local groups; global tokens, which attend to nothing here, form a group of their own."""
        return torch.where(is_global(i, self.global_tokens), -1, self.local.group(i))

    def candidate_keys(self, i: Tensor, positions: Tensor) -> Tensor:
        queries = i[~is_global(i, self.global_tokens)]
        if not len(queries):
            return positions[:0]
        last = self.global_tokens - 1 if isinstance(self.global_tokens, int) else self.global_tokens[-1]
        near = positions_between(max(0, int(queries.min()) - self.far), last, positions)
        global_keys = near[is_global(near, self.global_tokens)]
        return torch.cat([global_keys, self.local.candidate_keys(queries, positions)]).unique()


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
        count = self.weight.shape[0]
        episode = index.episodes
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
