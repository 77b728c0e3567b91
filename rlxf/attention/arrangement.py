"""Which queries are read together, and which keys are gathered for them: a pattern without all its pairs."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlxf.attention.index import EMPTY, Index
from rlxf.attention.kept import kept
from rlxf.attention.patterns.base import Pattern, between

PADDING = -1

STRETCH = 256
"""Runs are arranged as if they had a multiple of so many keys; what is too much is then left out."""

HELD = 2**28
"""Bytes of arrangements that are kept, of those used last."""

ENTRY = 1024
"""Bytes of one without tensors, about."""


@dataclass(frozen=True)
class Run:
    """The tokens of one episode in one row of the batch; positions count up slot by slot.

    Args:
        queries: positions of the queries.
        keys: positions of the keys.
    """

    queries: range
    keys: range

    def early(self, period: int | None) -> "Run":
        """This run, moved back by as many periods as there are before it."""
        if period is None:
            return self
        back = min(self.queries.start, self.keys.start) // period * period
        return Run(_moved_back(self.queries, back), _moved_back(self.keys, back))

    @property
    def longer(self) -> "Run":
        """This run as if it went on to a multiple of `STRETCH` keys: so there are few different ones."""
        most = -(-len(self.keys) // STRETCH) * STRETCH
        more = (most - len(self.keys)) // self.queries.step
        return Run(_longer(self.queries, more), _longer(self.keys, most - len(self.keys)))


def _moved_back(numbers: range, by: int) -> range:
    return range(numbers.start - by, numbers.stop - by, numbers.step)


def _longer(numbers: range, more: int) -> range:
    return range(numbers.start, numbers.stop + more * numbers.step, numbers.step)


@dataclass(frozen=True, eq=False)
class Part:
    """N groups of G queries, each with the K keys that they may see.

    Args:
        query: (N, G) int64, slots in the flattened (B Tq) queries; `PADDING` for none.
        key: (N, K) int64, slots in the flattened (B Tk) keys; `PADDING` for none.
        allowed: (N, G, K) bool, which of the keys each query may see.
    """

    query: Tensor
    key: Tensor
    allowed: Tensor

    def to(self, device: torch.device) -> "Part":
        """This part on a device."""
        return Part(self.query.to(device), self.key.to(device), self.allowed.to(device))

    def groups(self, some: slice) -> "Part":
        """Some of the groups."""
        return Part(self.query[some], self.key[some], self.allowed[some])

    def of(self, run: Run) -> "Part":
        """What is left of the part in a run that ends earlier."""
        query = self.query.masked_fill(self.query >= len(run.queries), PADDING)
        asking = (query != PADDING).any(1)
        query, key = query[asking], self.key[asking]
        key = key.masked_fill(key >= len(run.keys), PADDING)
        allowed = self.allowed[asking] & (query != PADDING)[:, :, None] & (key != PADDING)[:, None]
        return Part(query, key, allowed)

    def moved(self, query: Tensor, key: Tensor) -> "Part":
        """This part once for each pair of offsets (R,): N R groups."""
        allowed = self.allowed.expand(len(query), -1, -1, -1).flatten(0, 1)
        return Part(_moved(self.query, query), _moved(self.key, key), allowed)


def _moved(slots: Tensor, offsets: Tensor) -> Tensor:
    moved = torch.where(slots == PADDING, PADDING, slots + offsets[:, None, None])
    return moved.flatten(0, 1)


Places = dict[Run, list[tuple[int, int]]]
"""For each run, where in the flattened batch its first query and its first key stand."""


def early(rule: Pattern, places: Places) -> Places:
    """The same places, for runs as `Run.early` as the rule allows: there are fewer different ones."""
    found: Places = defaultdict(list)
    for run, offsets in places.items():
        found[run.early(rule.period)] += offsets
    return found


def count_pairs(rule: Pattern, causal: bool, places: Places) -> int:
    """How many pairs of query and key `arrange` would have computed."""
    return sum(
        len(offsets) * queries * keys
        for run, offsets in early(rule, places).items()
        for (queries, keys), some in group_run(rule, causal, run.longer).items()
        for i, _ in some
        if int(i[0]) < run.queries.stop
    )


def arrange(rule: Pattern, causal: bool, places: Places, device: torch.device) -> list[Part]:
    """The parts in which queries read keys. A query is in one of them, or sees nothing."""
    found = defaultdict(list)
    for run, offsets in early(rule, places).items():
        query, key = torch.tensor(offsets).unbind(1)
        for part in (whole.of(run) for whole in arrange_run(rule, causal, run.longer)):
            found[part.query.shape[1], part.key.shape[1]].append(part.moved(query, key).to(device))
    joined = [_joined(parts) for parts in found.values()]
    return [part for part in joined if len(part.query)]


def _joined(parts: list[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    names = ("query", "key", "allowed")
    return Part(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def find_runs(query: Index, key: Index) -> Places | None:
    """The runs of queries (B, Tq) and keys (B, Tk).

    None unless each episode is one stretch of slots, in which the positions of keys count up by one and those
    of queries by any step.
    """
    queries, keys = _stretches(query), _stretches(key)
    if queries is None or keys is None or any(among.step > 1 for _, among in keys.values()):
        return None
    places: Places = defaultdict(list)
    for episode, (slot, positions) in queries.items():
        if episode in keys:
            first, among = keys[episode]
            places[Run(positions, among)].append((slot, first))
    return places


def _stretches(index: Index) -> dict[tuple[int, int], tuple[int, range]] | None:
    """First flat slot and positions of each episode, by row and episode; None if one is no even stretch."""
    episodes = index.episode.cpu()
    begins = torch.ones_like(episodes, dtype=torch.bool)
    begins[:, 1:] = episodes[:, 1:] != episodes[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    counts = starts.diff(append=torch.tensor([begins.numel()]))
    pieces = index.position.flatten().cpu().split(counts.tolist())
    names = torch.stack([starts // index.shape[1], episodes.flatten()[starts], starts]).tolist()
    found: dict[tuple[int, int], tuple[int, range]] = {}
    for row, episode, start, piece in zip(*names, pieces, strict=True):
        if episode == EMPTY:
            continue
        positions = _as_range(piece)
        if positions is None or (row, episode) in found:
            return None
        found[row, episode] = (start, positions)
    return found


def _as_range(positions: Tensor) -> range | None:
    """Positions (N,) as a range; None if they do not go up by equal steps."""
    first, last, count = int(positions[0]), int(positions[-1]), len(positions)
    step = max(1, (last - first) // max(1, count - 1))
    even = torch.equal(positions, first + step * torch.arange(count))
    return range(first, first + count * step, step) if even else None


def _bytes_of_parts(parts: tuple[Part, ...]) -> int:
    return ENTRY + sum(tensor.nbytes for part in parts for tensor in (part.query, part.key, part.allowed))


@kept(HELD, _bytes_of_parts)
def arrange_run(rule: Pattern, causal: bool, run: Run) -> tuple[Part, ...]:
    """The parts of one run, whose slots count from 0. They depend on positions alone, and are kept."""
    sizes = group_run(rule, causal, run)
    return tuple(_part(rule, causal, run, pairs, *size) for size, pairs in sizes.items())


Groups = dict[tuple[int, int], list[tuple[Tensor, Tensor]]]


def _bytes_of_groups(sizes: Groups) -> int:
    return ENTRY + sum(i.nbytes + j.nbytes for pairs in sizes.values() for i, j in pairs)


@kept(HELD, _bytes_of_groups)
def group_run(rule: Pattern, causal: bool, run: Run) -> Groups:
    """The positions of queries and keys of each group of a run, by the size that their part has."""
    sizes = defaultdict(list)
    among = torch.arange(run.keys.start, run.keys.stop)
    for i in groups(rule, torch.tensor(run.queries)):
        j = rule.keys(i, between(run.keys.start, int(i.max()), among) if causal else among)
        if len(j):
            sizes[rounded(len(i)), rounded(len(j))].append((i, j))
    return sizes


def groups(rule: Pattern, i: Tensor) -> tuple[Tensor, ...]:
    """Query positions i (N,) in the groups that the rule puts them in."""
    number, order = rule.group(i).sort(stable=True)
    return i[order].split(number.unique_consecutive(return_counts=True)[1].tolist())


def rounded(size: int) -> int:
    """The next larger of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, ...: few sizes, little padding."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def _part(
    rule: Pattern, causal: bool, run: Run, pairs: list[tuple[Tensor, Tensor]], queries: int, keys: int
) -> Part:
    """A part from the positions of queries and keys of each group; its slots count from 0."""
    i, j = _padded([i for i, _ in pairs], queries), _padded([j for _, j in pairs], keys)
    allowed = rule.allows(i[:, :, None], j[:, None]) & (i != PADDING)[:, :, None] & (j != PADDING)[:, None]
    if causal:
        allowed &= i[:, :, None] >= j[:, None]
    query = (i - run.queries.start).div(run.queries.step, rounding_mode="floor")
    return Part(
        query.masked_fill(i == PADDING, PADDING),
        (j - run.keys.start).masked_fill(j == PADDING, PADDING),
        allowed,
    )


def _padded(rows: list[Tensor], length: int) -> Tensor:
    """Rows of different lengths as (N, length)."""
    table = torch.full((len(rows) + 1, length), PADDING)
    longest = pad_sequence(rows, batch_first=True, padding_value=PADDING)
    table[: len(rows), : longest.shape[1]] = longest
    return table[: len(rows)]
