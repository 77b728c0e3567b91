"""Attention inside buckets of tokens: sorting by bucket, blocks of the sorted tokens, and their masks."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.online_softmax import online_softmax
from rlxf.attention.kernels.softmax import SoftmaxAttention, weighted_average
from rlxf.attention.sparse.layout import BlockGroup, round_up_size
from rlxf.attention.token_index import EMPTY, TokenIndex

QUERIES_PER_GROUP = 32
"""Number of queries of one bucket in a group."""

MIN_KEYS_PER_GROUP = 16
"""Least number of keys per group; fewer would not be faster."""


ComparePositions = Callable[[Tensor, Tensor], Tensor]
"""Comparison of the positions of a query and a key of its bucket: True if the query may see the key."""


@dataclass(frozen=True, eq=False)
class BucketedTokens:
    """Tokens with their buckets and positions.

    Args:
        buckets: (B, H, T, R), integers of any dtype, one for each round.
        index: positions and episodes of the tokens, (B, T).
    """

    buckets: Tensor
    index: TokenIndex


@dataclass(frozen=True, eq=False)
class SortedTokens:
    """Tokens of one round, sorted by row, head, episode, bucket and position.

    Args:
        place: (N,) int64, ascending: ``bucket_id * span + position``; negative for empty slots.
        slot: (N,) int64, slot of the token in the flattened (B H T).
        span: number of positions.
    """

    place: Tensor
    slot: Tensor
    span: int


def bucket_groups(
    queries: BucketedTokens, keys: BucketedTokens, causal: bool, compare_positions: ComparePositions
) -> list[BlockGroup]:
    """Return each pair of a query and a key of one episode that share a bucket in some round, once.

    Args:
        queries: the queries.
        keys: the keys.
        causal: whether keys after a query are hidden.
        compare_positions: for example ``torch.gt`` for earlier keys.

    Returns:
        Parts whose slots index the flattened (B H T); for padding, see `online_softmax`.
    """
    rounds = _sorted_rounds(queries, keys)
    query_buckets, key_buckets = (tokens.buckets.flatten(0, 2).int() for tokens in (queries, keys))
    parts = []
    for number, (round_queries, round_keys) in enumerate(zip(*rounds, strict=True)):
        for part in _parts_of_round(round_queries, round_keys, causal, compare_positions):
            _hide(part, query_buckets[:, :number], key_buckets[:, :number])
            parts.append(part)
    return parts


def _hide(part: BlockGroup, query_buckets: Tensor, key_buckets: Tensor) -> None:
    """Mask pairs that share a bucket (N, rounds) in an earlier round, in place."""
    slots = part.query.clamp(max=len(query_buckets) - 1)
    for a, b in zip(query_buckets.unbind(1), key_buckets.unbind(1), strict=True):
        part.allowed.logical_and_(a[slots][:, :, None] != b[part.key][:, None])


def _sorted_rounds(
    queries: BucketedTokens, keys: BucketedTokens
) -> tuple[list[SortedTokens], list[SortedTokens]]:
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
    tokens: BucketedTokens, episode: Tensor, episodes: int, buckets: int, span: int, least: int
) -> list[SortedTokens]:
    """Sort the tokens of each round; ``episode`` (B, T) is numbered from 0."""
    batch, heads = tokens.buckets.shape[:2]
    head_id = torch.arange(batch * heads, device=episode.device).view(batch, heads, 1)
    episode_id = (head_id * episodes + episode[:, None])[..., None]
    bucket_id = episode_id * buckets + tokens.buckets.long() - least
    sort_key = bucket_id * span + tokens.index.position[:, None, :, None]
    sort_key = sort_key.masked_fill((tokens.index.episode == EMPTY)[:, None, :, None], -1)
    return [SortedTokens(*x.flatten().sort(), span) for x in sort_key.unbind(-1)]


def _parts_of_round(
    queries: SortedTokens, keys: SortedTokens, causal: bool, compare_positions: ComparePositions
) -> list[BlockGroup]:
    """Return the pairs of one round, in groups of up to `QUERIES_PER_GROUP` queries of one bucket and
    their keys.
    """
    start, end, bucket_id = _groups(queries)
    first = torch.searchsorted(keys.place, bucket_id * keys.span)
    last = queries.place[end - 1] if causal else (bucket_id + 1) * keys.span - 1
    number = torch.searchsorted(keys.place, last, right=True) - first
    parts = []
    sizes, inverse = number.unique(return_inverse=True)
    padded = torch.tensor(
        [max(MIN_KEYS_PER_GROUP, round_up_size(size)) if size else 0 for size in sizes.tolist()]
    )
    size_of = padded.to(inverse.device)[inverse]
    for size in sorted(set(padded.tolist()) - {0}):
        chosen = size_of == size
        key_range = first[chosen], first[chosen] + number[chosen]
        query_range = start[chosen], end[chosen]
        parts.append(_part(queries, keys, query_range, key_range, size, compare_positions))
    return parts


def _groups(queries: SortedTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return start, end and bucket of groups of sorted queries, (P,) each."""
    bucket_ids, counts = queries.place.div(queries.span, rounding_mode="floor").unique_consecutive(
        return_counts=True
    )
    ends = counts.cumsum(0)
    groups = (counts + QUERIES_PER_GROUP - 1) // QUERIES_PER_GROUP
    bucket = torch.arange(len(bucket_ids), device=bucket_ids.device).repeat_interleave(groups)
    number = torch.arange(len(bucket), device=bucket_ids.device) - (groups.cumsum(0) - groups)[bucket]
    start = (ends - counts)[bucket] + QUERIES_PER_GROUP * number
    filled = bucket_ids[bucket] >= 0
    return (
        start[filled],
        torch.minimum(start + QUERIES_PER_GROUP, ends[bucket])[filled],
        bucket_ids[bucket][filled],
    )


def _part(
    queries: SortedTokens,
    keys: SortedTokens,
    query_range: tuple[Tensor, Tensor],
    key_range: tuple[Tensor, Tensor],
    size: int,
    compare_positions: ComparePositions,
) -> BlockGroup:
    """Build a part of groups of sorted queries, from start to end, and up to ``size`` keys for each."""
    i, is_query = _ranges(*query_range, QUERIES_PER_GROUP, len(queries.slot))
    j, is_key = _ranges(*key_range, size, len(keys.slot))
    allowed = compare_positions(queries.place[i][:, :, None], keys.place[j][:, None]) & is_key[:, None]
    query = torch.where(is_query, queries.slot[i], len(queries.slot))
    return BlockGroup(query, keys.slot[j], allowed & is_query[:, :, None])


def _ranges(start: Tensor, end: Tensor, size: int, limit: int) -> tuple[Tensor, Tensor]:
    """Return the numbers from start on, below the limit, (P, size), and whether each is before the end."""
    numbers = start[:, None] + torch.arange(size, device=start.device)
    return numbers.clamp(max=limit - 1), numbers < end[:, None]


MIN_PAIRS_TO_SORT = 1 << 17
"""Number of query-key pairs from which tokens are sorted by bucket instead of computing all pairs."""


class BucketAttention(SoftmaxAttention):
    """``o_i = sum_j n_ij exp(s_ij) v_j / sum_j n_ij exp(s_ij)``, where key j counts n_ij times.

    The output is 0 if no key counts. The buckets of a token, one for each of R rounds, are appended to the
    features of its query and key.

    Time and memory grow with the pairs that share a bucket if the pattern is `Full`, sequences are long, and
    there is neither a bias nor dropout. Otherwise they grow with all pairs. The result is the same.

    Args:
        rounds: R.
    """

    def __init__(self, rounds: int):
        super().__init__()
        self.rounds = rounds

    @abstractmethod
    def counts(self, query_buckets: Tensor, key_buckets: Tensor, mask: AttentionMask) -> Tensor:
        """Return n, (B, H, Tq, Tk), of the buckets (B, H, Tq, R) and (B, H, Tk, R); 0 for masked pairs."""

    @abstractmethod
    def compare_positions(self, mask: AttentionMask) -> ComparePositions:
        """Return the comparison of positions that decides which keys of its bucket a query sees."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask, dropout: float
    ) -> Tensor:
        if bias is None and not dropout and self.uses_sorting(mask):
            return self.sorted_forward(q, k, v, mask)
        return weighted_average(self.weights(q, k, bias, mask, dropout), v)

    def weights(
        self, q: Tensor, k: Tensor, bias: Tensor | None, mask: AttentionMask, dropout: float
    ) -> Tensor:
        (q, query_buckets), (k, key_buckets) = self.split(q), self.split(k)
        counts = self.counts(query_buckets, key_buckets, mask)
        fully_masked = ~(counts > 0).any(-1, keepdim=True)
        log_counts = (counts + fully_masked.to(counts.dtype)).to(q.dtype).log()
        bias = log_counts if bias is None else bias + log_counts
        return super().weights(q, k, bias, mask, dropout).masked_fill(fully_masked, 0.0)

    def allows_gathering(self, mask: AttentionMask) -> bool:
        """Return False where tokens are sorted by bucket."""
        return not self.uses_sorting(mask)

    def uses_sorting(self, mask: AttentionMask) -> bool:
        """Return whether to sort tokens by their buckets."""
        pairs = mask.query.shape[1] * mask.key.shape[1]
        return pairs >= MIN_PAIRS_TO_SORT and all(rule.sees_all for rule in mask.head_patterns)

    def sorted_forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Compute `forward` by sorting tokens: (B, H, Tq, V)."""
        return self.attend_within_buckets(q, k, v, mask)[0]

    def attend_within_buckets(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """Attend within buckets: (B, H, Tq, V), and whether a query has visible keys, (B, H, Tq, 1)."""
        (q, query_buckets), (k, key_buckets) = self.split(q), self.split(k)
        queries, keys = BucketedTokens(query_buckets, mask.query), BucketedTokens(key_buckets, mask.key)
        parts = bucket_groups(queries, keys, mask.causal, self.compare_positions(mask))
        return online_softmax(q, k, v, parts)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split x into features (B, H, T, D) and buckets (B, H, T, R)."""
        return x[..., : -self.rounds], x[..., -self.rounds :]


def count_shared_rounds(query_buckets: Tensor, key_buckets: Tensor) -> Tensor:
    """Return the number of rounds in which query and key share a bucket, (B, H, Tq, Tk) int64."""
    rounds = zip(query_buckets.unbind(-1), key_buckets.unbind(-1), strict=True)
    return torch.stack([a[..., :, None] == b[..., None, :] for a, b in rounds]).sum(0)
