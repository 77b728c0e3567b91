"""Attention inside buckets of tokens: sorting by bucket, groups of sorted tokens, and an online softmax."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.autograd import first_derivative_only
from rlxf.attention.kernels.base import Kernel
from rlxf.attention.kernels.softmax import SoftmaxAttention, weighted_average
from rlxf.attention.sparse.plan import BlockGroup, round_up_size
from rlxf.attention.token_index import EMPTY, TokenIndex

MIN_PAIRS_TO_SORT = 1 << 17
"""Minimum number of query-key pairs for sorting tokens by bucket; with fewer, all pairs are computed."""

QUERIES_PER_GROUP = 32
"""Maximum number of queries in a group; all are of one bucket."""

MIN_KEYS_PER_GROUP = 16
"""Minimum number of keys per group; fewer would not be faster."""

LOG_ZERO = -1e30
"""Logarithm of a weight of 0; with -inf, differences would be nan."""

PAIRS_PER_STEP = 1 << 18
"""Number of pairs whose scores are computed at a time; they fit a processor's cache."""

ComparePositions = Callable[[Tensor, Tensor], Tensor]
"""Comparison of the positions of a query and a key of its bucket: True if the query may attend to the key."""


class BucketAttention(SoftmaxAttention):
    """``o_i = sum_j n_ij exp(s_ij) v_j / sum_j n_ij exp(s_ij)``, where key j counts n_ij times.

    The output is 0 if no key counts. The buckets of a token, one for each of R rounds, are appended to the
    features of its query and key.

    Time and memory grow with the pairs that share a bucket if the pattern is `Full`, sequences are long, and
    there is neither a bias nor dropout. Otherwise they grow with all pairs. Sorting counts
    each pair once: a subclass whose counts can exceed 1 overrides `uses_sorting` to return False.

    Args:
        rounds: number of rounds R.
    """

    def __init__(self, rounds: int):
        super().__init__()
        self.rounds = rounds

    @abstractmethod
    def counts(self, query_buckets: Tensor, key_buckets: Tensor, mask: AttentionMask) -> Tensor:
        """Return the counts n (B, H, Tq, Tk), which are 0 for masked pairs.

        Buckets of queries are (B, H, Tq, R), those of keys (B, H, Tk, R).
        """

    @abstractmethod
    def compare_positions(self, mask: AttentionMask) -> ComparePositions:
        """Return the comparison of positions that decides which keys of its bucket a query attends to."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        if bias is None and not self.active_dropout and self.uses_sorting(mask):
            return self.sorted_forward(q, k, v, mask)[0]
        return weighted_average(self.weights(q, k, bias, mask), v)

    def weights(self, q: Tensor, k: Tensor, bias: Tensor | None, mask: AttentionMask) -> Tensor:
        (q, query_buckets), (k, key_buckets) = self.split(q), self.split(k)
        counts = self.counts(query_buckets, key_buckets, mask)
        fully_masked = ~(counts > 0).any(-1, keepdim=True)
        log_counts = (counts + fully_masked.to(counts.dtype)).to(q.dtype).log()
        bias = log_counts if bias is None else bias + log_counts
        return super().weights(q, k, bias, mask).masked_fill(fully_masked, 0.0)

    def allows_gathering(self, mask: AttentionMask) -> bool:
        """Return False where tokens are sorted by bucket."""
        return not self.uses_sorting(mask)

    def uses_sorting(self, mask: AttentionMask) -> bool:
        """Return whether to sort tokens by their buckets."""
        pairs = mask.query.shape[1] * mask.key.shape[1]
        return pairs >= MIN_PAIRS_TO_SORT and all(rule.allows_all_keys for rule in mask.head_patterns)

    def sorted_forward(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Compute `forward` by sorting tokens.

        Returns:
            The output (B, H, Tq, V), and whether a query has visible keys in its buckets, (B, H, Tq, 1) bool.
        """
        (q, query_buckets), (k, key_buckets) = self.split(q), self.split(k)
        parts = bucket_groups(query_buckets, key_buckets, mask, self.compare_positions(mask))
        return online_softmax(q, k, v, parts)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Split x into features (B, H, T, D) and buckets (B, H, T, R)."""
        return x[..., : -self.rounds], x[..., -self.rounds :]


def check_bucket_numbers(kernel: Kernel, largest: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless a dtype represents all whole numbers up to ``largest``, which are buckets."""
    exact = int(2 / torch.finfo(dtype).eps)
    if largest > exact:
        raise ValueError(
            f"{kernel} stores bucket numbers up to {largest} with the features of keys, and their dtype "
            f"{dtype} represents whole numbers up to {exact} only; use fewer buckets or a wider dtype"
        )


def count_shared_rounds(query_buckets: Tensor, key_buckets: Tensor) -> Tensor:
    """Return the number of rounds in which query and key share a bucket, (B, H, Tq, Tk) int64."""
    rounds = zip(query_buckets.unbind(-1), key_buckets.unbind(-1), strict=True)
    return torch.stack([a[..., :, None] == b[..., None, :] for a, b in rounds]).sum(0)


class SortedTokens(NamedTuple):
    """Tokens of one round, sorted by row, head, episode, bucket and position.

    Args:
        place: (N,) int64, ascending: ``bucket_id * span + position``; negative for empty slots.
        slot: (N,) int64, slot of the token in the flattened (B H T).
    """

    place: Tensor
    slot: Tensor


def bucket_groups(
    query_buckets: Tensor, key_buckets: Tensor, mask: AttentionMask, compare_positions: ComparePositions
) -> list[BlockGroup]:
    """Return each pair of a query and a key of one episode that share a bucket in some round, once.

    Args:
        query_buckets: (B, H, Tq, R), integers of any dtype, one for each round.
        key_buckets: (B, H, Tk, R).
        mask: positions and episodes of the tokens, and whether keys after a query are hidden.
        compare_positions: for example ``torch.gt`` for earlier keys.

    Returns:
        Parts whose slots index the flattened (B H T); for padding, see `online_softmax`.
    """
    index = mask.query.concatenate(mask.key)
    span = int(index.position.max()) + 1
    places = _places(torch.cat([query_buckets, key_buckets], dim=2).long(), index, span)
    by_round = places.split([mask.query.shape[1], mask.key.shape[1]], dim=2)
    query_buckets, key_buckets = (buckets.flatten(0, 2).int() for buckets in (query_buckets, key_buckets))
    parts = []
    for number, places_of_round in enumerate(zip(*(x.unbind(-1) for x in by_round), strict=True)):
        queries, keys = (SortedTokens(*x.flatten().sort()) for x in places_of_round)
        for part in _parts_of_round(queries, keys, span, mask.causal, compare_positions):
            _hide(part, query_buckets[:, :number], key_buckets[:, :number])
            parts.append(part)
    return parts


def _places(buckets: Tensor, index: TokenIndex, span: int) -> Tensor:
    """Return the place of each token, as in `SortedTokens`: buckets (B, H, T, R) -> (B, H, T, R) int64."""
    batch, heads = buckets.shape[:2]
    buckets = buckets - buckets.min()
    episode_ids, episode = index.episode.unique(return_inverse=True)
    head_id = torch.arange(batch * heads, device=episode.device).view(batch, heads, 1)
    episode_id = (head_id * len(episode_ids) + episode[:, None])[..., None]
    bucket_id = episode_id * (int(buckets.max()) + 1) + buckets
    place = bucket_id * span + index.position[:, None, :, None]
    return place.masked_fill((index.episode == EMPTY)[:, None, :, None], -1)


def _hide(part: BlockGroup, query_buckets: Tensor, key_buckets: Tensor) -> None:
    """Mask pairs that share a bucket (N, rounds) in an earlier round, in place."""
    slots = part.query.clamp(max=len(query_buckets) - 1)
    for a, b in zip(query_buckets.unbind(1), key_buckets.unbind(1), strict=True):
        part.allowed.logical_and_(a[slots][:, :, None] != b[part.key][:, None])


def _parts_of_round(
    queries: SortedTokens, keys: SortedTokens, span: int, causal: bool, compare_positions: ComparePositions
) -> Iterator[BlockGroup]:
    """Yield the pairs of one round, in groups of up to `QUERIES_PER_GROUP` queries of one bucket and
    their keys.
    """
    start, end, bucket_id = _groups(queries.place.div(span, rounding_mode="floor"))
    first = torch.searchsorted(keys.place, bucket_id * span)
    last = queries.place[end - 1] if causal else (bucket_id + 1) * span - 1
    number = torch.searchsorted(keys.place, last, right=True) - first
    distinct, inverse = number.unique(return_inverse=True)
    padded = [max(MIN_KEYS_PER_GROUP, round_up_size(size)) if size else 0 for size in distinct.tolist()]
    size_of = torch.tensor(padded, device=inverse.device)[inverse]
    for size in sorted(set(padded) - {0}):
        chosen = size_of == size
        i, is_query = _ranges(start[chosen], end[chosen], QUERIES_PER_GROUP, len(queries.slot))
        j, is_key = _ranges(first[chosen], (first + number)[chosen], size, len(keys.slot))
        allowed = compare_positions(queries.place[i][:, :, None], keys.place[j][:, None]) & is_key[:, None]
        query = torch.where(is_query, queries.slot[i], len(queries.slot))
        yield BlockGroup(query, keys.slot[j], allowed & is_query[:, :, None])


def _groups(buckets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return start, end and bucket of groups of queries, (P,) each; buckets (N,) are sorted."""
    number = torch.arange(len(buckets), device=buckets.device) - torch.searchsorted(buckets, buckets)
    start = (number % QUERIES_PER_GROUP == 0).nonzero()[:, 0]
    end = F.pad(start[1:], (0, 1), value=len(buckets))
    filled = buckets[start] >= 0
    return start[filled], end[filled], buckets[start][filled]


def _ranges(start: Tensor, end: Tensor, size: int, limit: int) -> tuple[Tensor, Tensor]:
    """Return ``size`` consecutive numbers from each start, clamped to limit - 1, and whether each is before
    the end: two tensors (P, size).
    """
    numbers = start[:, None] + torch.arange(size, device=start.device)
    return numbers.clamp(max=limit - 1), numbers < end[:, None]


def online_softmax(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[BlockGroup]) -> tuple[Tensor, Tensor]:
    """Compute ``o_i = sum exp(s_ij) v_j / sum exp(s_ij)`` over the pairs of all parts; 0 without keys.

    Pairs that are in two parts count twice. Scores are ``q_i . k_j / sqrt(D)``. The backward pass recomputes
    them instead of storing them: in addition to ``parts``, memory grows with L.

    Source: the merging of partial softmaxes is that of Dao et al. 2022, arXiv:2205.14135, section 3.1.

    Args:
        q: (B, H, Tq, D).
        k: (B, H, Tk, D).
        v: (B, H, Tk, V).
        parts: slots index the flattened (B H Tq) queries and (B H Tk) keys. Padding is slot (B H Tq) for a
            query, and any slot for a key.

    Returns:
        o, (B, H, Tq, V), and whether a query attends to any key, (B, H, Tq, 1) bool.
    """
    queries, keys, values = (x.flatten(0, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    output, has_keys = _OnlineSoftmax.apply(queries, keys, values, parts)  # type: ignore[no-untyped-call]
    return output.unflatten(0, q.shape[:3]), has_keys.view(*q.shape[:3], 1)


class _OnlineSoftmax(torch.autograd.Function):
    """Autograd function of `online_softmax` over rows. An additional row stands for padding."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[BlockGroup]
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        q = _padded(q)
        out = q.new_zeros(len(q), v.shape[1], dtype=wide)
        total = q.new_full((len(q),), LOG_ZERO, dtype=wide)
        for part in _slabs(parts):
            scores = _scores(F.embedding(part.query, q), F.embedding(part.key, k), part)
            top = scores.amax(-1, keepdim=True).clamp(min=LOG_ZERO)
            weights = scores.sub_(top).exp_()
            partial = torch.bmm(weights, F.embedding(part.key, v))
            _merge(out, total, part.query.flatten(), partial.flatten(0, 1), weights.sum(-1), top)
        has_keys = total[:-1] > LOG_ZERO / 2
        ctx.save_for_backward(q, k, v, out, total)
        ctx.parts = parts
        ctx.mark_non_differentiable(has_keys)
        return out[:-1].to(v.dtype), has_keys

    @staticmethod
    @first_derivative_only("attention in buckets (LSH, Routing)")
    def backward(ctx: Any, grad_out: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, total = ctx.saved_tensors
        grad_out = _padded(grad_out)
        inner = (grad_out * out).sum(-1).to(q.dtype)
        total = total.to(q.dtype)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v))
        for part in _slabs(ctx.parts):
            queries, keys = F.embedding(part.query, q), F.embedding(part.key, k)
            grad = F.embedding(part.query, grad_out)
            weights = _scores(queries, keys, part).sub_(total[part.query][..., None]).exp_()
            grad_scores = torch.bmm(grad, F.embedding(part.key, v).transpose(1, 2))
            grad_scores = grad_scores.sub_(inner[part.query][..., None]).mul_(weights)
            _add(grad_v, part.key, torch.bmm(weights.transpose(1, 2), grad))
            _add(grad_q, part.query, torch.bmm(grad_scores, keys))
            _add(grad_k, part.key, torch.bmm(grad_scores.transpose(1, 2), queries))
        return grad_q[:-1].to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _padded(x: Tensor) -> Tensor:
    """Append a row of zeros to x (N, D)."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def _slabs(parts: Sequence[BlockGroup]) -> Iterator[BlockGroup]:
    """Yield the parts in slices of at most `PAIRS_PER_STEP` pairs, or of a single group."""
    for part in parts:
        groups, queries = part.query.shape
        size = max(1, PAIRS_PER_STEP // (queries * part.key.shape[1]))
        for start in range(0, groups, size):
            yield part.at(slice(start, start + size))


def _scores(queries: Tensor, keys: Tensor, part: BlockGroup) -> Tensor:
    """Return the scores (P, G, K) of queries (P, G, D) and keys (P, K, D), -inf for masked pairs."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    return scores.masked_fill_(~part.allowed, -torch.inf)


def _add(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """Add values (P, G, D) to the rows (N, D) at slots (P, G), in place."""
    rows.index_add_(0, slots.flatten(), values.flatten(0, 1).to(rows.dtype))


def _merge(out: Tensor, total: Tensor, slots: Tensor, partial: Tensor, weight: Tensor, top: Tensor) -> None:
    """Merge the weighted sums of a part into the averages of its queries, in place.

    Args:
        out: averages (N, V).
        total: logarithm of the sum of all weights so far (N,).
        slots: slots of the queries (M,).
        partial: sum of ``exp(s - top) v`` (M, V).
        weight: sum of ``exp(s - top)``, M numbers.
        top: largest score, or `LOG_ZERO`: M numbers.
    """
    before, top = total[slots], top.flatten().to(total.dtype)
    after = torch.logaddexp(before, (top + weight.flatten().log()).clamp(min=LOG_ZERO))
    total.index_copy_(0, slots, after)
    old = out.index_select(0, slots).mul_((before - after).exp_()[:, None])
    out.index_copy_(0, slots, old.addcmul_(partial.to(out.dtype), (top - after).exp_()[:, None]))
