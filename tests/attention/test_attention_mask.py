"""Tests of attention masks."""

from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.attention import Full, TokenIndex, Window
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.token_index import EMPTY
from tests.attention.worlds import ANYWHERE, index_of

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
def masks(draw: st.DrawFn) -> AttentionMask:
    queries, memory, batch = draw(st.integers(1, 5)), draw(st.integers(0, 5)), draw(st.integers(1, 2))
    key = draw(st.one_of(indices(queries + memory, batch), segments(queries + memory, batch)))
    query = draw(st.one_of(st.just(key.last(queries)), indices(queries, batch)))
    pattern = draw(st.one_of(st.just(Full()), st.integers(1, 8).map(Window)))
    return AttentionMask(query, key, pattern, draw(st.booleans()), torch.float64)


def pairs(mask: AttentionMask) -> list[tuple[int, int, int]]:
    """Return (row, query, key) of all visible pairs, by the definition."""
    visible, (batch, queries), keys = [], mask.query.shape, mask.key.shape[1]
    for b in range(batch):
        for q in range(queries):
            for k in range(keys):
                i, j = int(mask.query.position[b, q]), int(mask.key.position[b, k])
                same = mask.query.episode[b, q] == mask.key.episode[b, k] != EMPTY
                if same and abs(i - j) <= mask.pattern.max_distance and (i >= j or not mask.causal):
                    visible.append((b, q, k))
    return visible


@given(mask=masks())
@settings(max_examples=150)
def test_mask_equals_definition(mask):
    seen = set(pairs(mask))
    assert {tuple(pair) for pair in mask.allowed.nonzero().tolist()} == seen
    alone = {(b, q) for b, q in torch.ones(mask.query.shape).nonzero().tolist()}
    blind = alone - {(b, q) for b, q, _ in seen}
    visible = [] if mask.fully_masked is None else mask.fully_masked.nonzero().tolist()
    assert {tuple(pair) for pair in visible} == blind
    hidden = torch.full((*mask.query.shape, mask.key.shape[1]), -torch.inf, dtype=torch.float64)
    for b, q in blind:
        hidden[b, q] = 0
    for pair in seen:
        hidden[pair] = 0
    assert torch.equal(mask.mask[:, 0], hidden)


@given(mask=masks())
@settings(max_examples=200)
def test_aligned_implies_distance_of_slots(mask):
    offset = mask.key.shape[1] - mask.query.shape[1]
    if mask.aligned:
        for b, q, k in pairs(mask):
            pair_distance = mask.query.position[b, q] - mask.key.position[b, k]
            assert pair_distance == offset + q - k


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
    mask = AttentionMask(index, key, Full(), True, torch.float32)
    assert mask.aligned != any(has_hole(episodes) for episodes in index.episode.tolist())


def has_hole(episodes: list[int]) -> bool:
    """Return whether an empty slot lies inside an episode."""
    runs = [episode for episode, _ in groupby(episodes) if episode != EMPTY]
    return len(runs) > len(set(runs))


@pytest.mark.parametrize("names", [("position",), ("episode",), ("position", "episode")])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bool])
def test_index_of_another_dtype_is_an_error(names, dtype):
    """Keys of `find` hold position and episode in 64 bits."""
    parts = {"position": torch.zeros(1, 3).long(), "episode": torch.zeros(1, 3).long()}
    parts |= {name: parts[name].to(dtype) for name in names}
    with pytest.raises(TypeError, match=f"must have dtype torch.int64, got .*{dtype}.* convert"):
        TokenIndex(**parts)
