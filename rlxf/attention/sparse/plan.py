"""Plan of block-sparse attention: groups of queries with the keys of each, if they save time."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rlxf.attention.patterns.base import Pattern, positions_between
from rlxf.attention.token_index import EMPTY, TokenIndex, unrecorded

MIN_SPARSE_PAIRS = 1 << 16
"""Smallest number of query-key pairs per row for which attention is block-sparse."""
MIN_SAVING = 1.5
"""Block-sparse attention must have fewer pairs than dense attention by this factor."""
LARGE_PAIRS = 1 << 22
"""Number of pairs from which the factor `MIN_SAVING` doubles, because copied keys take memory."""


PADDING = -1


LENGTH_STEP = 256
"""Granularity, in keys, of cached layouts: lengths are rounded up to a multiple, the excess is masked."""


CACHE_BYTES = 2**28
"""Maximum total size of each cache of layouts, in bytes; the least recently used ones are evicted."""


ENTRY_BYTES = 1024
"""Approximate overhead of one cache entry, in bytes, without its tensors."""


class EpisodeSpan(NamedTuple):
    """Contiguous span of one episode in one row of the batch; positions increase from slot to slot.

    Args:
        queries: positions of the queries.
        keys: positions of the keys.
    """

    queries: range
    keys: range

    def shift_to_origin(self, period: int | None) -> "EpisodeSpan":
        """Return this span shifted towards position 0 by as many whole periods as possible."""
        if period is None:
            return self
        offset = min(self.queries.start, self.keys.start) // period * period
        return EpisodeSpan(*(range(x.start - offset, x.stop - offset, x.step) for x in self))

    @property
    def extended(self) -> "EpisodeSpan":
        """Return this span extended to a multiple of `LENGTH_STEP` keys, so that few distinct layouts
        exist.
        """
        extra = -len(self.keys) % LENGTH_STEP
        return EpisodeSpan(*(range(x.start, x.stop + extra // x.step * x.step, x.step) for x in self))


SpanOffsets = dict[EpisodeSpan, list[tuple[int, int]]]
"""Span -> slots of its first query and of its first key in the flattened batch, for each occurrence."""


class BlockGroup(NamedTuple):
    """N groups of G queries, each with K gathered keys.

    Args:
        query: (N, G) int64, slots in the flattened (B Tq) queries, or `PADDING`.
        key: (N, K) int64, slots in the flattened (B Tk) keys, or `PADDING`.
        allowed: (N, G, K) bool, attention mask: True where the query attends to the key.
    """

    query: Tensor
    key: Tensor
    allowed: Tensor

    def to(self, device: torch.device) -> "BlockGroup":
        """Return a copy on the given device."""
        return BlockGroup(*(tensor.to(device) for tensor in self))

    def at(self, groups: slice | Tensor) -> "BlockGroup":
        """Return the selected groups: a slice, or a bool (N,) mask."""
        return BlockGroup(*(tensor[groups] for tensor in self))

    def hide_padding(self) -> "BlockGroup":
        """Return this block group with padding masked."""
        filled = (self.query != PADDING)[:, :, None] & (self.key != PADDING)[:, None]
        return self._replace(allowed=self.allowed & filled)

    def restrict(self, span: EpisodeSpan) -> "BlockGroup":
        """Restrict this block group to a span that ends earlier than the one it was built for."""
        query = self.query.masked_fill(self.query >= len(span.queries), PADDING)
        key = self.key.masked_fill(self.key >= len(span.keys), PADDING)
        nonempty = (query != PADDING).any(1)
        return BlockGroup(query, key, self.allowed).at(nonempty).hide_padding()

    def repeat_at(self, query: Tensor, key: Tensor) -> "BlockGroup":
        """Repeat this block group at each of R pairs of slot offsets (R,): N R groups."""
        allowed = self.allowed.expand(len(query), -1, -1, -1).flatten(0, 1)
        return BlockGroup(_add_offsets(self.query, query), _add_offsets(self.key, key), allowed)


def _add_offsets(slots: Tensor, offsets: Tensor) -> Tensor:
    shifted = torch.where(slots == PADDING, PADDING, slots + offsets[:, None, None])
    return shifted.flatten(0, 1)


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


@unrecorded
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
    required_saving = MIN_SAVING * pair_cost * (2 if pairs >= LARGE_PAIRS else 1)
    dense_pairs = query.position.numel() * key.shape[1]
    all_visible = all(pattern.allows_all_keys for pattern in head_patterns)
    # Groups that attend to all keys take quadratic memory, so they are counted only if they may save time.
    if all_visible and count_visible_pairs(causal, spans) * required_saving > dense_pairs:
        return None
    sparse_pairs = sum(count_pairs(pattern, causal, spans) for pattern in head_patterns) / len(head_patterns)
    if sparse_pairs * required_saving > dense_pairs:
        return None
    device = key.position.device
    single = len(head_patterns) == 1
    return tuple(
        HeadGroup(slice(None) if single else heads, pattern, build_layout(pattern, causal, spans, device))
        for pattern, heads in head_patterns.items()
    )


def has_keys(plan: Sequence[HeadGroup], query: TokenIndex) -> Tensor:
    """Return which queries (B, Tq) have a visible key in some head: (B, Tq) bool."""
    result = torch.zeros(query.position.numel(), dtype=torch.bool, device=query.position.device)
    for blocks in (blocks for group in plan for blocks in group.blocks):
        result[blocks.query[blocks.allowed.any(-1)]] = True
    return result.view(query.shape)


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
    index = index.on_cpu
    episodes = index.episode
    is_start = torch.ones_like(episodes, dtype=torch.bool)
    is_start[:, 1:] = episodes[:, 1:] != episodes[:, :-1]
    starts = is_start.flatten().nonzero()[:, 0]
    counts = starts.diff(append=torch.tensor([is_start.numel()]))
    segments = index.position.flatten().split(counts.tolist())
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
    first = int(positions[0])
    last = int(positions[-1])
    count = len(positions)
    step = max(1, (last - first) // max(1, count - 1))
    regular = torch.equal(positions, first + step * torch.arange(count))
    return range(first, first + count * step, step) if regular else None


def merge_periods(pattern: Pattern, spans: SpanOffsets) -> SpanOffsets:
    """Merge spans that differ by whole periods of the pattern, which reduces the number of distinct spans."""
    merged: SpanOffsets = defaultdict(list)
    for span, offsets in spans.items():
        merged[span.shift_to_origin(pattern.shift_period)] += offsets
    return merged


def count_pairs(pattern: Pattern, causal: bool, spans: SpanOffsets) -> int:
    """Return the number of query-key pairs in the block groups that `build_layout` returns."""
    return sum(
        len(offsets) * i.shape[1] * j.shape[1] * int((i[:, 0] < span.queries.stop).sum())
        for span, offsets in merge_periods(pattern, spans).items()
        for i, j in group_span(pattern, causal, span.extended)
    )


def count_visible_pairs(causal: bool, spans: SpanOffsets) -> int:
    """Return the number of query-key pairs in the same episode, where all patterns allow them."""
    return sum(len(offsets) * _visible_in_span(causal, span) for span, offsets in spans.items())


def _visible_in_span(causal: bool, span: EpisodeSpan) -> int:
    if not causal:
        return len(span.queries) * len(span.keys)
    counts = torch.tensor(span.queries) + 1 - span.keys.start
    return int(counts.clamp(0, len(span.keys)).sum())


def build_layout(
    pattern: Pattern, causal: bool, spans: SpanOffsets, device: torch.device
) -> list[BlockGroup]:
    """Return the block groups of the batch. Queries without visible keys belong to no group."""
    by_size = defaultdict(list)
    for span, offsets in merge_periods(pattern, spans).items():
        query, key = torch.tensor(offsets).unbind(1)
        for extended in build_span_layout(pattern, causal, span.extended):
            blocks = extended.restrict(span)
            by_size[blocks.allowed.shape[1:]].append(blocks.repeat_at(query, key).to(device))
    merged = [BlockGroup(*map(torch.cat, zip(*parts, strict=True))) for parts in by_size.values()]
    return [blocks for blocks in merged if len(blocks.query)]


def count_bytes(result: Sequence[Sequence[Tensor]]) -> int:
    """Return the size of a cached result, in bytes."""
    return ENTRY_BYTES + sum(tensor.nbytes for tensors in result for tensor in tensors)


Result = TypeVar("Result")


class LRUCache(Generic[Result]):
    """Memoized function with a least-recently-used cache. Calls are thread-safe.

    Args:
        function: the function; its arguments must be hashable.
        max_bytes: maximum total size of the cached results, in bytes.
        size: function that returns the size of a result, in bytes.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        max_bytes: int = CACHE_BYTES,
        size: Callable[[Any], int] = count_bytes,
    ):
        self.function = function
        self.max_bytes = max_bytes
        self.size = size
        self.bytes = 0
        self._results: OrderedDict[tuple[Hashable, ...], Result] = OrderedDict()
        self._lock = Lock()

    def __call__(self, *args: Hashable) -> Result:
        """Return the cached result, or compute and cache it."""
        with self._lock:
            if args in self._results:
                self._results.move_to_end(args)
                return self._results[args]
        result = self.function(*args)
        with self._lock:
            self._insert(args, result)
        return result

    def _insert(self, args: tuple[Hashable, ...], result: Result) -> None:
        if args not in self._results:
            self.bytes += self.size(result)
        self._results[args] = result
        while self.bytes > self.max_bytes:
            _, oldest = self._results.popitem(last=False)
            self.bytes -= self.size(oldest)


@LRUCache
def build_span_layout(pattern: Pattern, causal: bool, span: EpisodeSpan) -> list[BlockGroup]:
    """Return the block groups of one span, with slots counted from its start.

    They depend on positions only, so they are cached.
    """
    return [_build_group(pattern, causal, span, i, j) for i, j in group_span(pattern, causal, span)]


@LRUCache
def group_span(pattern: Pattern, causal: bool, span: EpisodeSpan) -> list[tuple[Tensor, Tensor]]:
    """Group the queries of a span as the pattern defines, with the candidate keys of each group.

    Returns:
        Positions of the queries (N, G) and keys (N, K) of N groups, padded with `PADDING`, for each padded
        size (G, K).
    """
    positions = torch.tensor(span.queries)
    by_size = defaultdict(list)
    candidates = torch.arange(span.keys.start, span.keys.stop)
    number, order = pattern.group(positions).sort(stable=True)
    for i in positions[order].split(number.unique_consecutive(return_counts=True)[1].tolist()):
        visible = positions_between(span.keys.start, int(i.max()), candidates) if causal else candidates
        j = pattern.candidate_keys(i, visible)
        if len(j):
            by_size[round_up_size(len(i)), round_up_size(len(j))].append((i, j))
    return [
        (_pad([i for i, _ in groups], queries), _pad([j for _, j in groups], keys))
        for (queries, keys), groups in by_size.items()
    ]


def round_up_size(size: int) -> int:
    """Round up to one of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, ...: few sizes, little padding."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def _build_group(pattern: Pattern, causal: bool, span: EpisodeSpan, i: Tensor, j: Tensor) -> BlockGroup:
    """Build a block group from positions of queries and keys; its slots count from the start of the span."""
    allowed = pattern.mask_mod(i[:, :, None], j[:, None])
    if causal:
        allowed = allowed & (i[:, :, None] >= j[:, None])
    query = (i - span.queries.start).div(span.queries.step, rounding_mode="floor")
    query, key = query.masked_fill(i == PADDING, PADDING), j - span.keys.start
    return BlockGroup(query, key.masked_fill(j == PADDING, PADDING), allowed).hide_padding()


def _pad(rows: list[Tensor], length: int) -> Tensor:
    """Pad N rows to (N, length) with `PADDING`."""
    padded = pad_sequence(rows, batch_first=True, padding_value=PADDING)
    return F.pad(padded, (0, length - padded.shape[1]), value=PADDING)
