"""Who shares a bucket with whom, found by sorting: groups of queries and their keys."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.attention.arrangement import Part, rounded
from rlxf.attention.index import EMPTY, Index

GROUP = 32
"""Queries of one bucket that are read together."""

LEAST = 16
"""Keys that a group reads at least: fewer would be as slow."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens by bucket and place.

    Args:
        buckets: (B, H, T, R), whole numbers in any type, one for each round.
        index: where the tokens stand, (B, T).
    """

    buckets: Tensor
    index: Index


@dataclass(frozen=True, eq=False)
class Sorted:
    """All tokens of a round, sorted by row, head, episode, bucket and position.

    Args:
        place: (N,) int64, ascending: ``room * span + position``; less than 0 for empty slots.
        slot: (N,) int64, where the token stands in the flattened (B H T).
        span: so many positions are there.
    """

    place: Tensor
    slot: Tensor
    span: int


def parts_of_buckets(
    queries: Tokens, keys: Tokens, causal: bool, meets: Callable[[Tensor, Tensor], Tensor]
) -> list[Part]:
    """Each pair of a query and a key of one episode that share a bucket in some round and meet, once.

    Args:
        queries: who asks.
        keys: who is looked at.
        causal: whether no query sees a key that stands behind it.
        meets: whether a query sees a key, by where they stand: ``torch.gt`` for those before it.

    Returns:
        Parts whose slots count through the flattened (B H T); for padding, see `softmax_over_parts`.
    """
    rooms = _rooms(queries, keys)
    of_queries, of_keys = (one.buckets.flatten(0, 2).int() for one in (queries, keys))
    parts = []
    for number, (asking, heard) in enumerate(zip(*rooms, strict=True)):
        for part in _parts_of_round(asking, heard, causal, meets):
            _hide(part, of_queries[:, :number], of_keys[:, :number])
            parts.append(part)
    return parts


def _hide(part: Part, of_queries: Tensor, of_keys: Tensor) -> None:
    """Hide pairs that shared a bucket in an earlier round, in place; buckets (N, rounds)."""
    slots = part.query.clamp(max=len(of_queries) - 1)
    for a, b in zip(of_queries.unbind(1), of_keys.unbind(1), strict=True):
        part.allowed.logical_and_(a[slots][:, :, None] != b[part.key][:, None])


def _rooms(queries: Tokens, keys: Tokens) -> tuple[list[Sorted], list[Sorted]]:
    """The tokens of each round, sorted."""
    both = (queries, keys)
    least = min(int(one.buckets.min()) for one in both)
    buckets = max(int(one.buckets.max()) for one in both) - least + 1
    span = max(int(one.index.position.max()) for one in both) + 1
    episodes = torch.cat([one.index.episode for one in both], dim=1)
    names, episode = episodes.unique(return_inverse=True)
    parts = episode.split([one.index.shape[1] for one in both], dim=1)
    sizes = (len(names), buckets, span, least)
    return _sorted(queries, parts[0], *sizes), _sorted(keys, parts[1], *sizes)


def _sorted(
    tokens: Tokens, episode: Tensor, episodes: int, buckets: int, span: int, least: int
) -> list[Sorted]:
    """The tokens of each round, sorted; ``episode`` (B, T) counts from 0."""
    batch, heads = tokens.buckets.shape[:2]
    lane = torch.arange(batch * heads, device=episode.device).view(batch, heads, 1)
    stretch = (lane * episodes + episode[:, None])[..., None]
    room = stretch * buckets + tokens.buckets.long() - least
    place = room * span + tokens.index.position[:, None, :, None]
    place = place.masked_fill((tokens.index.episode == EMPTY)[:, None, :, None], -1)
    return [Sorted(*one.flatten().sort(), span) for one in place.unbind(-1)]


def _parts_of_round(
    queries: Sorted, keys: Sorted, causal: bool, meets: Callable[[Tensor, Tensor], Tensor]
) -> list[Part]:
    """Pairs of one round, in groups of up to `GROUP` queries of one bucket and about as many keys."""
    start, end, room = _groups(queries)
    first = torch.searchsorted(keys.place, room * keys.span)
    last = queries.place[end - 1] if causal else (room + 1) * keys.span - 1
    number = torch.searchsorted(keys.place, last, right=True) - first
    parts = []
    sizes, which = number.unique(return_inverse=True)
    roomy = torch.tensor([max(LEAST, rounded(size)) if size else 0 for size in sizes.tolist()])
    size_of = roomy.to(which.device)[which]
    for size in sorted(set(roomy.tolist()) - {0}):
        some = size_of == size
        parts.append(
            _part(
                queries,
                keys,
                (start[some], end[some]),
                (first[some], first[some] + number[some]),
                size,
                meets,
            )
        )
    return parts


def _groups(queries: Sorted) -> tuple[Tensor, Tensor, Tensor]:
    """Start, end and room of groups of sorted queries, (P,) each."""
    rooms, counts = queries.place.div(queries.span, rounding_mode="floor").unique_consecutive(
        return_counts=True
    )
    ends = counts.cumsum(0)
    groups = (counts + GROUP - 1) // GROUP
    which = torch.arange(len(rooms), device=rooms.device).repeat_interleave(groups)
    number = torch.arange(len(which), device=rooms.device) - (groups.cumsum(0) - groups)[which]
    start = (ends - counts)[which] + GROUP * number
    filled = rooms[which] >= 0
    return start[filled], torch.minimum(start + GROUP, ends[which])[filled], rooms[which][filled]


def _part(
    queries: Sorted,
    keys: Sorted,
    asking: tuple[Tensor, Tensor],
    heard: tuple[Tensor, Tensor],
    size: int,
    meets: Callable[[Tensor, Tensor], Tensor],
) -> Part:
    """Groups of queries, from start to end among the sorted, and ``size`` keys for each."""
    i, is_query = _stretch(*asking, GROUP, len(queries.slot))
    j, is_key = _stretch(*heard, size, len(keys.slot))
    allowed = meets(queries.place[i][:, :, None], keys.place[j][:, None]) & is_key[:, None]
    query = torch.where(is_query, queries.slot[i], len(queries.slot))
    return Part(query, keys.slot[j], allowed & is_query[:, :, None])


def _stretch(start: Tensor, end: Tensor, size: int, limit: int) -> tuple[Tensor, Tensor]:
    """(P, size): numbers from start on, below the limit, and which of them come before the end."""
    numbers = start[:, None] + torch.arange(size, device=start.device)
    return numbers.clamp(max=limit - 1), numbers < end[:, None]
