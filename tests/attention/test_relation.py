"""Tests of attention masks and of the conversion between scores by distance and by key."""

from functools import cache
from itertools import groupby

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.attention import Full, TokenIndex, Window, XLRelative
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.xl_relative import XLRelativeBias
from rlxf.attention.token_index import EMPTY
from tests.attention.oracle import close
from tests.attention.worlds import ANYWHERE, index_of, numbers

WIDTH, HEADS = 8, 2


STEPS = (1, 1, 1, 1, 0, 2, -1)
JUMPS = (0, 0, 0, 0, 1, 2, -1)
"""Changes of position and episode from slot to slot: the usual ones, and some irregular ones."""


@st.composite
def indices(draw: st.DrawFn, slots: int, batch: int) -> TokenIndex:
    """Strategy for indices that are close to contiguous."""
    moves = st.tuples(st.sampled_from(STEPS), st.sampled_from(JUMPS))
    rows = st.lists(st.lists(moves, min_size=slots, max_size=slots), min_size=batch, max_size=batch)
    position, episode = torch.tensor(draw(rows)).cumsum(dim=1).unbind(-1)
    holes = draw(st.lists(st.integers(0, slots - 1), max_size=2))
    episode[:, holes] = EMPTY
    return TokenIndex(position, episode.clamp(min=EMPTY))


def segments(slots: int, batch: int) -> st.SearchStrategy[TokenIndex]:
    one = st.lists(st.sampled_from(ANYWHERE), min_size=slots, max_size=slots)
    return st.lists(one, min_size=batch, max_size=batch).map(index_of)


@st.composite
def relations(draw: st.DrawFn) -> AttentionMask:
    queries, memory, batch = draw(st.integers(1, 5)), draw(st.integers(0, 5)), draw(st.integers(1, 2))
    key = draw(st.one_of(indices(queries + memory, batch), segments(queries + memory, batch)))
    query = draw(st.one_of(st.just(key.last(queries)), indices(queries, batch)))
    pattern = draw(st.one_of(st.just(Full()), st.integers(1, 8).map(Window)))
    return AttentionMask(query, key, pattern, draw(st.booleans()), torch.float64)


def pairs(relation: AttentionMask) -> list[tuple[int, int, int]]:
    """Return (row, query, key) of all visible pairs, by the definition."""
    visible, (batch, queries), keys = [], relation.query.shape, relation.key.shape[1]
    for b in range(batch):
        for q in range(queries):
            for k in range(keys):
                i, j = int(relation.query.position[b, q]), int(relation.key.position[b, k])
                same = relation.query.episode[b, q] == relation.key.episode[b, k] != EMPTY
                if same and abs(i - j) <= relation.pattern.max_distance and (i >= j or not relation.causal):
                    visible.append((b, q, k))
    return visible


@given(relation=relations())
@settings(max_examples=150)
def test_mask_equals_definition(relation):
    seen = set(pairs(relation))
    assert {tuple(pair) for pair in relation.allowed.nonzero().tolist()} == seen
    alone = {(b, q) for b, q in torch.ones(relation.query.shape).nonzero().tolist()}
    blind = alone - {(b, q) for b, q, _ in seen}
    visible = [] if relation.fully_masked is None else relation.fully_masked.nonzero().tolist()
    assert {tuple(pair) for pair in visible} == blind
    hidden = torch.full((*relation.query.shape, relation.key.shape[1]), -torch.inf, dtype=torch.float64)
    for b, q in blind:
        hidden[b, q] = 0
    for pair in seen:
        hidden[pair] = 0
    assert torch.equal(relation.mask[:, 0], hidden)


@given(relation=relations())
@settings(max_examples=200)
def test_aligned_implies_distance_of_slots(relation):
    offset = relation.key.shape[1] - relation.query.shape[1]
    if relation.aligned:
        for b, q, k in pairs(relation):
            pair_distance = relation.query.position[b, q] - relation.key.position[b, k]
            assert pair_distance == offset + q - k


@given(relation=relations())
@settings(max_examples=200)
def test_scores_by_distance_equal_definition(relation):
    """The score of a pair is that of its distance, with the shifted view and with the gather."""
    position, distances = relative_position(), relation.distances
    assert (distances.diff() == -1).all()
    table = position.table(distances, None)
    q = numbers(relation.query.shape[0], HEADS, relation.query.shape[1], WIDTH // HEADS)
    by_key = position.bias(q, q, relation, table)
    for b, i, j in pairs(relation):
        pair_distance = relation.query.position[b, i] - relation.key.position[b, j]
        column = table[..., distances.tolist().index(int(pair_distance))]
        close(by_key[b, :, i, j], ((q[b, :, i] + position.v) * column).sum(-1), 1e-12)


@given(relation=relations())
@settings(max_examples=200)
def test_key_scores_and_spread_equal_definition(relation):
    """Scores of keys with a distance, and scores of a distance only, equal the definition."""
    size, distances = WIDTH // HEADS, relation.distances.tolist()
    table = numbers(HEADS, size, len(distances), seed=1)
    k = numbers(relation.key.shape[0], HEADS, relation.key.shape[1], size)
    of_keys, spread = relation.key_scores(k, table), relation.spread(table[:, 0])
    spread = spread.expand(k.shape[0], -1, -1, -1)
    for b, i, j in pairs(relation):
        column = distances.index(int(relation.query.position[b, i] - relation.key.position[b, j]))
        close(of_keys[b, :, i, j], (k[b, :, j] * table[..., column]).sum(-1), 1e-12)
        close(spread[b, :, i, j], table[:, 0, column], 0)


@given(relation=relations())
@settings(max_examples=200)
def test_by_distance_equals_definition(relation):
    (batch, queries), keys = relation.query.shape, relation.key.shape[1]
    weights = numbers(batch, HEADS, queries, keys)
    if relation.fully_masked is None:
        weights = weights.masked_fill(~relation.allowed[:, None], 0.0)
    else:
        weights = weights.masked_fill(~(relation.allowed | relation.fully_masked[..., None])[:, None], 0.0)
    distances = relation.distances.tolist()
    expected = torch.zeros(batch, HEADS, queries, len(distances), dtype=torch.float64)
    for b, i, j in pairs(relation):
        column = distances.index(int(relation.query.position[b, i] - relation.key.position[b, j]))
        expected[b, :, i, column] += weights[b, :, i, j]
    close(relation.key_to_distance(weights), expected, 1e-12)


@cache
def relative_position() -> XLRelativeBias:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        position = XLRelative().build(WIDTH, HEADS).double()
        torch.nn.init.normal_(position.v)
    return position


@given(index=st.integers(2, 8).flatmap(lambda slots: indices(slots, 2)))
@settings(max_examples=200)
def test_unbroken_implies_contiguous_episodes(index):
    if index.contiguous:
        for b in range(index.shape[0]):
            slots = [slot for slot in range(index.shape[1]) if index.episode[b, slot] != EMPTY]
            for one in slots:
                for other in slots:
                    if index.episode[b, one] == index.episode[b, other]:
                        assert index.position[b, one] - index.position[b, other] == one - other


@given(memory=st.integers(0, 4), index=st.integers(2, 8).flatmap(lambda slots: segments(slots, 2)))
@settings(max_examples=100)
def test_segments_after_empty_memory_are_aligned(memory, index):
    """A contiguous segment after empty memory uses the shifted view, which is faster than a gather."""
    key = TokenIndex.empty(2, memory).concatenate(index)
    relation = AttentionMask(index, key, Full(), True, torch.float32)
    assert relation.aligned != any(has_hole(episodes) for episodes in index.episode.tolist())


def has_hole(episodes: list[int]) -> bool:
    """Return whether an empty slot lies inside an episode."""
    runs = [episode for episode, _ in groupby(episodes) if episode != EMPTY]
    return len(runs) > len(set(runs))
