"""Decision between dense and block-sparse attention, from the spans of episodes in a batch."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.attention.patterns.base import Pattern
from rlxf.attention.sparse.layout import BlockGroup, EpisodeSpan, SpanOffsets, build_layout, count_pairs
from rlxf.attention.token_index import EMPTY, TokenIndex

MIN_SAVING, MIN_SPARSE_PAIRS, LARGE_PAIRS = 1.5, 1 << 16, 1 << 22
"""Block-sparse attention requires at least MIN_SPARSE_PAIRS query-key pairs per row, and at least MIN_SAVING
times fewer pairs than dense attention. From LARGE_PAIRS on the factor doubles: copied keys take memory."""


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Heads with the same pattern, and the block groups of that pattern.

    Args:
        heads: head numbers, or a slice of all heads.
        pattern: pattern of these heads.
        blocks: block groups; each query is in at most one group, else it has no visible keys.
    """

    heads: list[int] | slice
    pattern: Pattern
    blocks: list[BlockGroup]


def plan_sparse(
    query: TokenIndex,
    key: TokenIndex,
    head_patterns: Mapping[Pattern, list[int]],
    causal: bool,
    pair_cost: float,
) -> tuple[HeadGroup, ...] | None:
    """Plan block-sparse attention; None where dense attention is faster, or episodes are not contiguous.

    Args:
        query: index of the queries, (B, Tq).
        key: index of the keys, (B, Tk).
        head_patterns: distinct patterns, and the heads that use each.
        causal: whether future keys are masked.
        pair_cost: cost of a pair with gathered keys, relative to its cost in dense attention.
    """
    pairs = query.shape[1] * key.shape[1]
    if pairs < MIN_SPARSE_PAIRS:
        return None
    spans = find_episode_spans(query, key)
    if spans is None:
        return None
    sparse_pairs = sum(count_pairs(pattern, causal, spans) for pattern in head_patterns) / len(head_patterns)
    required_saving = MIN_SAVING * pair_cost * (2 if pairs >= LARGE_PAIRS else 1)
    if sparse_pairs * required_saving > query.position.numel() * key.shape[1]:
        return None
    device, single = key.position.device, len(head_patterns) == 1
    return tuple(
        HeadGroup(slice(None) if single else heads, pattern, build_layout(pattern, causal, spans, device))
        for pattern, heads in head_patterns.items()
    )


def has_keys(plan: Sequence[HeadGroup], query: TokenIndex) -> Tensor:
    """Return which queries (B, Tq) have a visible key in some head: (B, Tq) bool."""
    result = torch.zeros_like(query.position, dtype=torch.bool)
    for blocks in (blocks for group in plan for blocks in group.blocks):
        result.view(-1)[blocks.query[blocks.allowed.any(-1)]] = True
    return result


def find_episode_spans(query: TokenIndex, key: TokenIndex) -> SpanOffsets | None:
    """Return the episode spans of queries (B, Tq) and keys (B, Tk), or None if there is no regular layout.

    In a regular layout each episode occupies contiguous slots. Positions of keys increase by 1, positions of
    queries by any constant step.
    """
    queries, keys = _episode_ranges(query), _episode_ranges(key)
    if queries is None or keys is None or any(positions.step > 1 for _, positions in keys.values()):
        return None
    spans: SpanOffsets = defaultdict(list)
    for episode, (query_slot, query_positions) in queries.items():
        if episode in keys:
            key_slot, key_positions = keys[episode]
            spans[EpisodeSpan(query_positions, key_positions)].append((query_slot, key_slot))
    return spans


def _episode_ranges(index: TokenIndex) -> dict[tuple[int, int], tuple[int, range]] | None:
    """Map (row, episode) to its first flat slot and its positions; None without a regular layout."""
    episodes = index.episode.cpu()
    is_start = torch.ones_like(episodes, dtype=torch.bool)
    is_start[:, 1:] = episodes[:, 1:] != episodes[:, :-1]
    starts = is_start.flatten().nonzero()[:, 0]
    counts = starts.diff(append=torch.tensor([is_start.numel()]))
    segments = index.position.flatten().cpu().split(counts.tolist())
    labels = torch.stack([starts // index.shape[1], episodes.flatten()[starts], starts]).tolist()
    ranges: dict[tuple[int, int], tuple[int, range]] = {}
    for row, episode, start, segment in zip(*labels, segments, strict=True):
        if episode == EMPTY:
            continue
        positions = _as_range(segment)
        if positions is None or (row, episode) in ranges:
            return None
        ranges[row, episode] = (start, positions)
    return ranges


def _as_range(positions: Tensor) -> range | None:
    """Return positions (N,) as a range, or None if they do not increase by a constant step."""
    first, last, count = int(positions[0]), int(positions[-1]), len(positions)
    step = max(1, (last - first) // max(1, count - 1))
    regular = torch.equal(positions, first + step * torch.arange(count))
    return range(first, first + count * step, step) if regular else None
