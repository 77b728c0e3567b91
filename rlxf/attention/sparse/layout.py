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
from rlxf.attention.token_index import EMPTY, TokenIndex

Result = TypeVar("Result")


class LRUCache(Generic[Result]):
    """Memoized function with a least-recently-used cache. Calls are thread-safe.

    Args:
        make: the function; its arguments must be hashable.
        most: maximum total size of the cached results, in bytes.
        size: function that returns the size of a result, in bytes.
    """

    def __init__(self, make: Callable[..., Result], most: int, size: Callable[[Result], int]):
        self.make, self.max_bytes, self.size = make, most, size
        self.held = 0
        self._results: OrderedDict[tuple[Hashable, ...], Result] = OrderedDict()
        self._lock = Lock()

    def __call__(self, *args: Hashable) -> Result:
        """Return the cached result, or compute and cache it."""
        with self._lock:
            if args in self._results:
                self._results.move_to_end(args)
                return self._results[args]
        result = self.make(*args)
        with self._lock:
            self._insert(args, result)
        return result

    def _insert(self, args: tuple[Hashable, ...], result: Result) -> None:
        if args not in self._results:
            self.held += self.size(result)
        self._results[args] = result
        while self.held > self.max_bytes:
            _, oldest = self._results.popitem(last=False)
            self.held -= self.size(oldest)


def lru_cache_bytes(
    most: int, size: Callable[[Result], int]
) -> Callable[[Callable[..., Result]], LRUCache[Result]]:
    """Return a decorator that caches up to ``most`` bytes of results; see `LRUCache`."""
    return lambda make: LRUCache(make, most, size)


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
    def rounded_up(self) -> "EpisodeSpan":
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

    def to(self, device: torch.device) -> "BlockGroup":
        """Return a copy on the given device."""
        return BlockGroup(self.query.to(device), self.key.to(device), self.allowed.to(device))

    def groups(self, some: slice) -> "BlockGroup":
        """Return the selected groups."""
        return BlockGroup(self.query[some], self.key[some], self.allowed[some])

    def of(self, run: EpisodeSpan) -> "BlockGroup":
        """Restrict this block group to a span that ends earlier than the one it was built for."""
        query = self.query.masked_fill(self.query >= len(run.queries), PADDING)
        nonempty = (query != PADDING).any(1)
        query, key = query[nonempty], self.key[nonempty]
        key = key.masked_fill(key >= len(run.keys), PADDING)
        allowed = self.allowed[nonempty] & (query != PADDING)[:, :, None] & (key != PADDING)[:, None]
        return BlockGroup(query, key, allowed)

    def moved(self, query: Tensor, key: Tensor) -> "BlockGroup":
        """Repeat this block group at each of R pairs of slot offsets (R,): N R groups."""
        allowed = self.allowed.expand(len(query), -1, -1, -1).flatten(0, 1)
        return BlockGroup(_add_offsets(self.query, query), _add_offsets(self.key, key), allowed)


def _add_offsets(slots: Tensor, offsets: Tensor) -> Tensor:
    shifted = torch.where(slots == PADDING, PADDING, slots + offsets[:, None, None])
    return shifted.flatten(0, 1)


SpanOffsets = dict[EpisodeSpan, list[tuple[int, int]]]
"""Span -> slots of its first query and of its first key in the flattened batch, for each occurrence."""


def merge_periods(rule: Pattern, places: SpanOffsets) -> SpanOffsets:
    """Merge spans that differ by whole periods of the pattern, which reduces the number of distinct spans."""
    merged: SpanOffsets = defaultdict(list)
    for run, offsets in places.items():
        merged[run.shift_to_origin(rule.shift_period)] += offsets
    return merged


def count_pairs(rule: Pattern, causal: bool, places: SpanOffsets) -> int:
    """Return the number of query-key pairs in the block groups that `build_layout` returns."""
    return sum(
        len(offsets) * queries * keys
        for run, offsets in merge_periods(rule, places).items()
        for (queries, keys), pairs in group_span(rule, causal, run.rounded_up).items()
        for i, _ in pairs
        if int(i[0]) < run.queries.stop
    )


def build_layout(rule: Pattern, causal: bool, places: SpanOffsets, device: torch.device) -> list[BlockGroup]:
    """Return the block groups of the batch. Each query belongs to at most one; otherwise it sees no key."""
    by_size = defaultdict(list)
    for run, offsets in merge_periods(rule, places).items():
        query, key = torch.tensor(offsets).unbind(1)
        for part in (extended.of(run) for extended in build_span_layout(rule, causal, run.rounded_up)):
            by_size[part.query.shape[1], part.key.shape[1]].append(part.moved(query, key).to(device))
    merged = [_concatenate(parts) for parts in by_size.values()]
    return [part for part in merged if len(part.query)]


def _concatenate(parts: list[BlockGroup]) -> BlockGroup:
    if len(parts) == 1:
        return parts[0]
    names = ("query", "key", "allowed")
    return BlockGroup(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def find_episode_spans(query: TokenIndex, key: TokenIndex) -> SpanOffsets | None:
    """Return the episode spans of queries (B, Tq) and keys (B, Tk), or None if there is no regular layout.

    In a regular layout each episode occupies contiguous slots. Positions of keys increase by 1, positions of
    queries by any constant step.
    """
    queries, keys = _episode_ranges(query), _episode_ranges(key)
    if queries is None or keys is None or any(positions.step > 1 for _, positions in keys.values()):
        return None
    places: SpanOffsets = defaultdict(list)
    for episode, (query_slot, query_positions) in queries.items():
        if episode in keys:
            key_slot, key_positions = keys[episode]
            places[EpisodeSpan(query_positions, key_positions)].append((query_slot, key_slot))
    return places


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


def _bytes_of_parts(parts: tuple[BlockGroup, ...]) -> int:
    return ENTRY_BYTES + sum(
        tensor.nbytes for part in parts for tensor in (part.query, part.key, part.allowed)
    )


@lru_cache_bytes(CACHE_BYTES, _bytes_of_parts)
def build_span_layout(rule: Pattern, causal: bool, run: EpisodeSpan) -> tuple[BlockGroup, ...]:
    """Return the block groups of one span, with slots counted from its start.

    They depend on positions only, so they are cached.
    """
    sizes = group_span(rule, causal, run)
    return tuple(_build_group(rule, causal, run, pairs, *size) for size, pairs in sizes.items())


Groups = dict[tuple[int, int], list[tuple[Tensor, Tensor]]]
"""Padded size (G, K) -> positions of the queries and of the keys of each group."""


def _bytes_of_groups(sizes: Groups) -> int:
    return ENTRY_BYTES + sum(i.nbytes + j.nbytes for pairs in sizes.values() for i, j in pairs)


@lru_cache_bytes(CACHE_BYTES, _bytes_of_groups)
def group_span(rule: Pattern, causal: bool, run: EpisodeSpan) -> Groups:
    """Return the positions of the queries and keys of each group of a span, by padded size."""
    sizes = defaultdict(list)
    candidates = torch.arange(run.keys.start, run.keys.stop)
    for i in split_groups(rule, torch.tensor(run.queries)):
        j = rule.candidate_keys(
            i, positions_between(run.keys.start, int(i.max()), candidates) if causal else candidates
        )
        if len(j):
            sizes[round_up_size(len(i)), round_up_size(len(j))].append((i, j))
    return sizes


def split_groups(rule: Pattern, i: Tensor) -> tuple[Tensor, ...]:
    """Split query positions i (N,) into the groups that the pattern defines."""
    number, order = rule.group(i).sort(stable=True)
    return i[order].split(number.unique_consecutive(return_counts=True)[1].tolist())


def round_up_size(size: int) -> int:
    """Round up to one of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, ...: few sizes, little padding."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def _build_group(
    rule: Pattern, causal: bool, run: EpisodeSpan, pairs: list[tuple[Tensor, Tensor]], queries: int, keys: int
) -> BlockGroup:
    """Build a block group from positions of queries and keys; its slots count from the start of the span."""
    i, j = _pad([i for i, _ in pairs], queries), _pad([j for _, j in pairs], keys)
    allowed = rule.mask_mod(i[:, :, None], j[:, None]) & (i != PADDING)[:, :, None] & (j != PADDING)[:, None]
    if causal:
        allowed &= i[:, :, None] >= j[:, None]
    query = (i - run.queries.start).div(run.queries.step, rounding_mode="floor")
    return BlockGroup(
        query.masked_fill(i == PADDING, PADDING),
        (j - run.keys.start).masked_fill(j == PADDING, PADDING),
        allowed,
    )


def _pad(rows: list[Tensor], length: int) -> Tensor:
    """Pad N rows to (N, length) with `PADDING`."""
    table = torch.full((len(rows) + 1, length), PADDING)
    padded = pad_sequence(rows, batch_first=True, padding_value=PADDING)
    table[: len(rows), : padded.shape[1]] = padded
    return table[: len(rows)]
