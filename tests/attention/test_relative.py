"""Tests of the conversion between scores by distance and by key."""

from functools import cache

import torch
from hypothesis import given, settings

from rlxf.agents.common.gradient_programs import record
from rlxf.attention import Full, TokenIndex, XLRelative
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.xl_relative import XLRelativeBias
from tests.attention.oracle import close
from tests.attention.test_attention_mask import masks, pairs
from tests.attention.worlds import numbers

WIDTH, HEADS = 8, 2


@given(mask=masks())
@settings(max_examples=200)
def test_scores_by_distance_equal_definition(mask):
    """The score of a pair is that of its distance, with the shifted view and with the gather."""
    position, distances = relative_position(), mask.relative.distances
    assert (distances.diff() == -1).all()
    table = position.table(distances, None)
    q = numbers(mask.query.shape[0], HEADS, mask.query.shape[1], WIDTH // HEADS)
    by_key = position.bias(q, q, mask, table)
    for b, i, j in pairs(mask):
        pair_distance = mask.query.position[b, i] - mask.key.position[b, j]
        column = table[..., distances.tolist().index(int(pair_distance))]
        close(by_key[b, :, i, j], ((q[b, :, i] + position.v) * column).sum(-1), 1e-12)


@given(mask=masks())
@settings(max_examples=200)
def test_key_scores_and_lookup_equal_definition(mask):
    """Scores of keys with a distance, and scores of a distance only, equal the definition."""
    size, distances = WIDTH // HEADS, mask.relative.distances.tolist()
    table = numbers(HEADS, size, len(distances), seed=1)
    k = numbers(mask.key.shape[0], HEADS, mask.key.shape[1], size)
    of_keys, by_distance = mask.relative.key_scores(k, table), mask.relative.lookup(table[:, 0])
    by_distance = by_distance.expand(k.shape[0], -1, -1, -1)
    for b, i, j in pairs(mask):
        column = distances.index(int(mask.query.position[b, i] - mask.key.position[b, j]))
        close(of_keys[b, :, i, j], (k[b, :, j] * table[..., column]).sum(-1), 1e-12)
        close(by_distance[b, :, i, j], table[:, 0, column], 0)


@given(mask=masks())
@settings(max_examples=200)
def test_by_distance_equals_definition(mask):
    (batch, queries), keys = mask.query.shape, mask.key.shape[1]
    weights = numbers(batch, HEADS, queries, keys)
    if mask.fully_masked is None:
        weights = weights.masked_fill(~mask.allowed[:, None], 0.0)
    else:
        weights = weights.masked_fill(~(mask.allowed | mask.fully_masked[..., None])[:, None], 0.0)
    distances = mask.relative.distances.tolist()
    expected = torch.zeros(batch, HEADS, queries, len(distances), dtype=torch.float64)
    for b, i, j in pairs(mask):
        column = distances.index(int(mask.query.position[b, i] - mask.key.position[b, j]))
        expected[b, :, i, column] += weights[b, :, i, j]
    close(mask.relative.key_to_distance(mask.zero_masked_rows(weights)), expected, 1e-12)


@cache
def relative_position() -> XLRelativeBias:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        position = XLRelative().build(WIDTH, HEADS).double()
        torch.nn.init.normal_(position.v)
    return position


@given(mask=masks())
@settings(max_examples=60, deadline=None)
def test_recorded_scores_equal_others(mask):
    """A recorded program, which pads the table, has the same visible scores and gradients."""
    (batch, queries), relative = mask.query.shape, mask.relative
    q = numbers(batch, HEADS, queries, WIDTH // HEADS)
    table = numbers(HEADS, WIDTH // HEADS, len(relative.distances), seed=1)
    weights = numbers(batch, HEADS, queries, mask.key.shape[1], seed=2) * mask.allowed[:, None]

    def scores_and_gradients(q, table):
        q, table = (x.detach().requires_grad_() for x in (q, table))
        scores = relative.scores(q, table).masked_fill(~mask.allowed[:, None], 0.0)
        return scores, *torch.autograd.grad((scores * weights).sum(), (q, table))

    own = record(scores_and_gradients, [q, table])(q, table)
    for mine, expected in zip(own, scores_and_gradients(q, table), strict=True):
        close(mine, expected, 1e-12)


def test_recorded_scores_of_consecutive_tokens_are_a_view():
    index = TokenIndex.range(2, 6)
    mask = AttentionMask(index, index, Full(), True, torch.float64)
    assert mask.relative.pairs is None
    table = numbers(HEADS, WIDTH // HEADS, len(mask.relative.distances))
    q = numbers(2, HEADS, 6, WIDTH // HEADS, seed=1)
    program = record(lambda q: mask.relative.scores(q, table), [q])
    assert "constant_pad_nd" in program.code
    assert "copy_" not in program.code
