"""Groups of queries and keys that share a bucket, found by sorting."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.attention.arrangement import Part, rounded
from rlxf.attention.index import EMPTY, Index

GROUP = 32
"""Number of queries of one bucket in a group."""

LEAST = 16
"""Least number of keys per group; fewer would not be faster."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens with their buckets and positions.

    Args:
        buckets: (B, H, T, R), integers of any dtype, one for each round.
        index: positions and episodes of the tokens, (B, T).
    """

    buckets: Tensor
    index: Index


@dataclass(frozen=True, eq=False)
class Sorted:
    """Tokens of one round, sorted by row, head, episode, bucket and position.

    Args:
        place: (N,) int64, ascending: ``bucket_id * span + position``; negative for empty slots.
        slot: (N,) int64, slot of the token in the flattened (B H T).
        span: number of positions.
    """

    place: Tensor
    slot: Tensor
    span: int


def parts_of_buckets(
    queries: Tokens, keys: Tokens, causal: bool, meets: Callable[[Tensor, Tensor], Tensor]
) -> list[Part]:
    """Return each pair of a query and a key of one episode that share a bucket in some round, once.

    Args:
        queries: the queries.
        keys: the keys.
        causal: whether keys after a query are hidden.
        meets: comparison of the positions of query and key, True if the query may see the key; ``torch.gt``
            for earlier keys.

    Returns:
        Parts whose slots index the flattened (B H T); for padding, see `softmax_over_parts`.
    """
    rounds = _sorted_rounds(queries, keys)
    query_buckets, key_buckets = (tokens.buckets.flatten(0, 2).int() for tokens in (queries, keys))
    parts = []
    for number, (round_queries, round_keys) in enumerate(zip(*rounds, strict=True)):
        for part in _parts_of_round(round_queries, round_keys, causal, meets):
            _hide(part, query_buckets[:, :number], key_buckets[:, :number])
            parts.append(part)
    return parts


def _hide(part: Part, query_buckets: Tensor, key_buckets: Tensor) -> None:
    """Mask pairs that share a bucket (N, rounds) in an earlier round, in place."""
    slots = part.query.clamp(max=len(query_buckets) - 1)
    for a, b in zip(query_buckets.unbind(1), key_buckets.unbind(1), strict=True):
        part.allowed.logical_and_(a[slots][:, :, None] != b[part.key][:, None])


def _sorted_rounds(queries: Tokens, keys: Tokens) -> tuple[list[Sorted], list[Sorted]]:
    """Return the sorted tokens of each round."""
    inputs = (queries, keys)
    least = min(int(x.buckets.min()) for x in inputs)
    buckets = max(int(x.buckets.max()) for x in inputs) - least + 1
    span = max(int(x.index.position.max()) for x in inputs) + 1
    episodes = torch.cat([x.index.episode for x in inputs], dim=1)
    episode_ids, episode = episodes.unique(return_inverse=True)
    parts = episode.split([x.index.shape[1] for x in inputs], dim=1)
    sizes = (len(episode_ids), buckets, span, least)
    return _sorted(queries, parts[0], *sizes), _sorted(keys, parts[1], *sizes)


def _sorted(
    tokens: Tokens, episode: Tensor, episodes: int, buckets: int, span: int, least: int
) -> list[Sorted]:
    """Sort the tokens of each round; ``episode`` (B, T) is numbered from 0."""
    batch, heads = tokens.buckets.shape[:2]
    head_id = torch.arange(batch * heads, device=episode.device).view(batch, heads, 1)
    episode_id = (head_id * episodes + episode[:, None])[..., None]
    bucket_id = episode_id * buckets + tokens.buckets.long() - least
    sort_key = bucket_id * span + tokens.index.position[:, None, :, None]
    sort_key = sort_key.masked_fill((tokens.index.episode == EMPTY)[:, None, :, None], -1)
    return [Sorted(*x.flatten().sort(), span) for x in sort_key.unbind(-1)]


def _parts_of_round(
    queries: Sorted, keys: Sorted, causal: bool, meets: Callable[[Tensor, Tensor], Tensor]
) -> list[Part]:
    """Return the pairs of one round, in groups of up to `GROUP` queries of one bucket and their keys."""
    start, end, bucket_id = _groups(queries)
    first = torch.searchsorted(keys.place, bucket_id * keys.span)
    last = queries.place[end - 1] if causal else (bucket_id + 1) * keys.span - 1
    number = torch.searchsorted(keys.place, last, right=True) - first
    parts = []
    sizes, inverse = number.unique(return_inverse=True)
    padded = torch.tensor([max(LEAST, rounded(size)) if size else 0 for size in sizes.tolist()])
    size_of = padded.to(inverse.device)[inverse]
    for size in sorted(set(padded.tolist()) - {0}):
        chosen = size_of == size
        parts.append(
            _part(
                queries,
                keys,
                (start[chosen], end[chosen]),
                (first[chosen], first[chosen] + number[chosen]),
                size,
                meets,
            )
        )
    return parts


def _groups(queries: Sorted) -> tuple[Tensor, Tensor, Tensor]:
    """Return start, end and bucket of groups of sorted queries, (P,) each."""
    bucket_ids, counts = queries.place.div(queries.span, rounding_mode="floor").unique_consecutive(
        return_counts=True
    )
    ends = counts.cumsum(0)
    groups = (counts + GROUP - 1) // GROUP
    bucket = torch.arange(len(bucket_ids), device=bucket_ids.device).repeat_interleave(groups)
    number = torch.arange(len(bucket), device=bucket_ids.device) - (groups.cumsum(0) - groups)[bucket]
    start = (ends - counts)[bucket] + GROUP * number
    filled = bucket_ids[bucket] >= 0
    return start[filled], torch.minimum(start + GROUP, ends[bucket])[filled], bucket_ids[bucket][filled]


def _part(
    queries: Sorted,
    keys: Sorted,
    query_range: tuple[Tensor, Tensor],
    key_range: tuple[Tensor, Tensor],
    size: int,
    meets: Callable[[Tensor, Tensor], Tensor],
) -> Part:
    """Build a part of groups of sorted queries, from start to end, and up to ``size`` keys for each."""
    i, is_query = _ranges(*query_range, GROUP, len(queries.slot))
    j, is_key = _ranges(*key_range, size, len(keys.slot))
    allowed = meets(queries.place[i][:, :, None], keys.place[j][:, None]) & is_key[:, None]
    query = torch.where(is_query, queries.slot[i], len(queries.slot))
    return Part(query, keys.slot[j], allowed & is_query[:, :, None])


def _ranges(start: Tensor, end: Tensor, size: int, limit: int) -> tuple[Tensor, Tensor]:
    """Return the numbers from start on, below the limit, (P, size), and whether each is before the end."""
    numbers = start[:, None] + torch.arange(size, device=start.device)
    return numbers.clamp(max=limit - 1), numbers < end[:, None]
