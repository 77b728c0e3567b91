"""Layout of block-sparse attention: groups of queries, the blocks of keys that they attend to, a cache."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlxf.attention.patterns.base import Pattern, positions_between

Result = TypeVar("Result")


class LRUCache(Generic[Result]):
    """Memoized function with a least-recently-used cache. Calls are thread-safe.

    Args:
        function: the function; its arguments must be hashable.
        max_bytes: maximum total size of the cached results, in bytes.
        size: function that returns the size of a result, in bytes.
    """

    def __init__(self, function: Callable[..., Result], max_bytes: int, size: Callable[[Result], int]):
        self.function, self.max_bytes, self.size = function, max_bytes, size
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


def lru_cache_bytes(
    max_bytes: int, size: Callable[[Result], int]
) -> Callable[[Callable[..., Result]], LRUCache[Result]]:
    """Return a decorator that caches up to ``max_bytes`` bytes of results; see `LRUCache`."""
    return lambda function: LRUCache(function, max_bytes, size)


PADDING = -1

LENGTH_STEP = 256
"""Granularity, in keys, of cached layouts: lengths are rounded up to a multiple, the excess is masked."""

CACHE_BYTES = 2**28
"""Maximum total size of each cache of layouts, in bytes; the least recently used ones are evicted."""

ENTRY_BYTES = 1024
"""Approximate overhead of one cache entry, in bytes, without its tensors."""


@dataclass(frozen=True)
class EpisodeSpan:
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
        return EpisodeSpan(_shift_range(self.queries, offset), _shift_range(self.keys, offset))

    @property
    def extended(self) -> "EpisodeSpan":
        """Return this span extended to a multiple of `LENGTH_STEP` keys, so that few distinct layouts
        exist.
        """
        length = -(-len(self.keys) // LENGTH_STEP) * LENGTH_STEP
        extra = (length - len(self.keys)) // self.queries.step
        return EpisodeSpan(
            _extend_range(self.queries, extra), _extend_range(self.keys, length - len(self.keys))
        )


def _shift_range(numbers: range, offset: int) -> range:
    return range(numbers.start - offset, numbers.stop - offset, numbers.step)


def _extend_range(numbers: range, extra: int) -> range:
    return range(numbers.start, numbers.stop + extra * numbers.step, numbers.step)


@dataclass(frozen=True, eq=False)
class BlockGroup:
    """N groups of G queries, each with K gathered keys.

    Args:
        query: (N, G) int64, slots in the flattened (B Tq) queries, or `PADDING`.
        key: (N, K) int64, slots in the flattened (B Tk) keys, or `PADDING`.
        allowed: (N, G, K) bool, attention mask: True where the query attends to the key.
    """

    query: Tensor
    key: Tensor
    allowed: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tensors."""
        return self.query, self.key, self.allowed

    def to(self, device: torch.device) -> "BlockGroup":
        """Return a copy on the given device."""
        return BlockGroup(*(tensor.to(device) for tensor in self.tensors()))

    def at(self, groups: slice) -> "BlockGroup":
        """Return the selected groups."""
        return BlockGroup(*(tensor[groups] for tensor in self.tensors()))

    def restrict(self, span: EpisodeSpan) -> "BlockGroup":
        """Restrict this block group to a span that ends earlier than the one it was built for."""
        query = self.query.masked_fill(self.query >= len(span.queries), PADDING)
        nonempty = (query != PADDING).any(1)
        query, key = query[nonempty], self.key[nonempty]
        key = key.masked_fill(key >= len(span.keys), PADDING)
        allowed = self.allowed[nonempty] & (query != PADDING)[:, :, None] & (key != PADDING)[:, None]
        return BlockGroup(query, key, allowed)

    def repeat_at(self, query: Tensor, key: Tensor) -> "BlockGroup":
        """Repeat this block group at each of R pairs of slot offsets (R,): N R groups."""
        allowed = self.allowed.expand(len(query), -1, -1, -1).flatten(0, 1)
        return BlockGroup(_add_offsets(self.query, query), _add_offsets(self.key, key), allowed)


def _add_offsets(slots: Tensor, offsets: Tensor) -> Tensor:
    shifted = torch.where(slots == PADDING, PADDING, slots + offsets[:, None, None])
    return shifted.flatten(0, 1)


SpanOffsets = dict[EpisodeSpan, list[tuple[int, int]]]
"""Span -> slots of its first query and of its first key in the flattened batch, for each occurrence."""


def merge_periods(pattern: Pattern, spans: SpanOffsets) -> SpanOffsets:
    """Merge spans that differ by whole periods of the pattern, which reduces the number of distinct spans."""
    merged: SpanOffsets = defaultdict(list)
    for span, offsets in spans.items():
        merged[span.shift_to_origin(pattern.shift_period)] += offsets
    return merged


def count_pairs(pattern: Pattern, causal: bool, spans: SpanOffsets) -> int:
    """Return the number of query-key pairs in the block groups that `build_layout` returns."""
    return sum(
        len(offsets) * queries * keys
        for span, offsets in merge_periods(pattern, spans).items()
        for (queries, keys), pairs in group_span(pattern, causal, span.extended).items()
        for i, _ in pairs
        if int(i[0]) < span.queries.stop
    )


def build_layout(
    pattern: Pattern, causal: bool, spans: SpanOffsets, device: torch.device
) -> list[BlockGroup]:
    """Return the block groups of the batch. Each query belongs to at most one; otherwise it sees no key."""
    by_size = defaultdict(list)
    for span, offsets in merge_periods(pattern, spans).items():
        query, key = torch.tensor(offsets).unbind(1)
        for extended in build_span_layout(pattern, causal, span.extended):
            blocks = extended.restrict(span)
            by_size[blocks.allowed.shape[1:]].append(blocks.repeat_at(query, key).to(device))
    merged = [_concatenate(parts) for parts in by_size.values()]
    return [blocks for blocks in merged if len(blocks.query)]


def _concatenate(parts: list[BlockGroup]) -> BlockGroup:
    if len(parts) == 1:
        return parts[0]
    return BlockGroup(*(torch.cat(tensors) for tensors in zip(*map(BlockGroup.tensors, parts), strict=True)))


def _bytes_of_blocks(groups: tuple[BlockGroup, ...]) -> int:
    return ENTRY_BYTES + sum(tensor.nbytes for blocks in groups for tensor in blocks.tensors())


@lru_cache_bytes(CACHE_BYTES, _bytes_of_blocks)
def build_span_layout(pattern: Pattern, causal: bool, span: EpisodeSpan) -> tuple[BlockGroup, ...]:
    """Return the block groups of one span, with slots counted from its start.

    They depend on positions only, so they are cached.
    """
    sizes = group_span(pattern, causal, span)
    return tuple(_build_group(pattern, causal, span, pairs, *size) for size, pairs in sizes.items())


Groups = dict[tuple[int, int], list[tuple[Tensor, Tensor]]]
"""Padded size (G, K) -> positions of the queries and of the keys of each group."""


def _bytes_of_groups(sizes: Groups) -> int:
    return ENTRY_BYTES + sum(i.nbytes + j.nbytes for pairs in sizes.values() for i, j in pairs)


@lru_cache_bytes(CACHE_BYTES, _bytes_of_groups)
def group_span(pattern: Pattern, causal: bool, span: EpisodeSpan) -> Groups:
    """Return the positions of the queries and keys of each group of a span, by padded size."""
    sizes = defaultdict(list)
    candidates = torch.arange(span.keys.start, span.keys.stop)
    for i in split_groups(pattern, torch.tensor(span.queries)):
        j = pattern.candidate_keys(
            i, positions_between(span.keys.start, int(i.max()), candidates) if causal else candidates
        )
        if len(j):
            sizes[round_up_size(len(i)), round_up_size(len(j))].append((i, j))
    return sizes


def split_groups(pattern: Pattern, i: Tensor) -> tuple[Tensor, ...]:
    """Split query positions i (N,) into the groups that the pattern defines."""
    number, order = pattern.group(i).sort(stable=True)
    return i[order].split(number.unique_consecutive(return_counts=True)[1].tolist())


def round_up_size(size: int) -> int:
    """Round up to one of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, ...: few sizes, little padding."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def _build_group(
    pattern: Pattern,
    causal: bool,
    span: EpisodeSpan,
    pairs: list[tuple[Tensor, Tensor]],
    queries: int,
    keys: int,
) -> BlockGroup:
    """Build a block group from positions of queries and keys; its slots count from the start of the span."""
    i, j = _pad([i for i, _ in pairs], queries), _pad([j for _, j in pairs], keys)
    allowed = pattern.mask_mod(i[:, :, None], j[:, None])
    allowed = allowed & (i != PADDING)[:, :, None] & (j != PADDING)[:, None]
    if causal:
        allowed &= i[:, :, None] >= j[:, None]
    query = (i - span.queries.start).div(span.queries.step, rounding_mode="floor")
    return BlockGroup(
        query.masked_fill(i == PADDING, PADDING),
        (j - span.keys.start).masked_fill(j == PADDING, PADDING),
        allowed,
    )


def _pad(rows: list[Tensor], length: int) -> Tensor:
    """Pad N rows to (N, length) with `PADDING`."""
    table = torch.full((len(rows) + 1, length), PADDING)
    padded = pad_sequence(rows, batch_first=True, padding_value=PADDING)
    table[: len(rows), : padded.shape[1]] = padded
    return table[: len(rows)]
