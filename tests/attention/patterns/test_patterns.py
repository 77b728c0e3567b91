"""Tests of patterns: maximum distance, candidate keys, groups, periods and random blocks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlxf.attention import (
    ETC,
    BigBird,
    BigBirdETC,
    Blockwise,
    Dilated,
    FixedColumns,
    Full,
    Local1D,
    Local2D,
    Longformer,
    Strided,
    TransformerSpec,
    Window,
)
from rlxf.attention.patterns.base import UNLIMITED, Pattern
from rlxf.attention.patterns.big_bird import hash_uniform
from rlxf.attention.spec import TECHNIQUES

HEADS, LAYERS, LENGTH = 3, 2, 96

PATTERNS = [
    Full(),
    Window(7),
    Dilated(4, 3),
    Dilated(3, 5, plain_heads=1),
    Local1D(6, 4),
    Local1D(5, 0),
    Local2D(12, 3, 4, 2, 3),
    Local2D(8, 2, 4, 3, 5),
    Local2D(6, 2, 3, 0, 1),
    Local2D(4, 3, 4, 1, 0),
    Strided(5),
    Strided(5, combination="merged", form="text"),
    Strided(4, combination="by-head"),
    FixedColumns(6, 2),
    FixedColumns(6, 2, summaries=3),
    FixedColumns(6, 1, combination="by-layer", summaries=2),
    FixedColumns(6, 1, combination="by-head"),
    Blockwise(4, 5),
    Blockwise(4, 3, ((0, 1, 2), (2, 0, 1))),
    ETC(4, 3),
    Longformer(6, global_tokens=2),
    Longformer(4, 3, 1),
    BigBird(4, 3, 2, 1),
    BigBird(4, 3, 0, 0),
    BigBirdETC(4, 1, 2, 3),
    ETC(4, 3, 7),
    ETC(4, 3, 2),
    Longformer(6, global_tokens=2, farthest=9),
    BigBirdETC(4, 1, 2, 3, farthest=11),
    Window(9) & Dilated(3, 4),
    Window(3) | Local1D(8, 2) | Strided(7, combination="by-head"),
]


def rules(pattern: Pattern) -> list[Pattern]:
    """Return the rules of all layers, global and local queries, and heads."""
    layers = [pattern.for_layer(layer) for layer in range(LAYERS)]
    return [rule for one in layers for kind in one.query_rules for rule in kind.for_heads(HEADS)]


RULES = list(dict.fromkeys(rule for pattern in PATTERNS for rule in rules(pattern)))


def all_pairs(rule: Pattern, length: int = LENGTH) -> Tensor:
    position = torch.arange(length)
    return rule.mask_mod(position[:, None], position).expand(length, length)


def test_every_pattern_is_covered():
    assert set(TECHNIQUES["pattern"].values()) <= {type(pattern) for pattern in PATTERNS}


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_reach_is_the_largest_distance(pattern):
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    farthest = max(int(distance[all_pairs(rule)].max()) for rule in rules(pattern))
    assert farthest == pattern.max_distance or (pattern.max_distance == UNLIMITED and farthest >= LENGTH // 2)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(data=st.data())
@settings(max_examples=15)
def test_candidate_keys_contain_all_visible_keys(rule, data):
    i = torch.tensor(sorted(data.draw(st.sets(st.integers(0, LENGTH - 1), min_size=1, max_size=9))))
    first = data.draw(st.integers(0, LENGTH - 1))
    candidates = torch.arange(first, data.draw(st.integers(first, LENGTH)))
    keys = rule.candidate_keys(i, candidates)
    assert set(keys.tolist()) <= set(candidates.tolist())
    assert (keys.diff() > 0).all()
    seen = candidates[rule.mask_mod(i[:, None], candidates).expand(len(i), len(candidates)).any(0)]
    assert set(seen.tolist()) <= set(keys.tolist())


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_groups_are_small_and_independent_of_other_queries(rule):
    i = torch.arange(1024)
    number = rule.group(i)
    assert torch.equal(rule.group(i[100:]), number[100:])
    assert number[number >= 0].bincount().max() <= 128


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("times", [1, 3, 1000])
def test_pattern_is_invariant_under_its_period(rule, times):
    if rule.shift_period is None:
        return
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    moved = times * rule.shift_period
    assert torch.equal(
        rule.mask_mod(i + moved, j + moved).expand(LENGTH, LENGTH), rule.mask_mod(i, j).expand(LENGTH, LENGTH)
    )


def test_period_of_joined_patterns():
    assert (Window(9) & Strided(4)).shift_period == 1
    assert (Local1D(6, 4) | FixedColumns(4, 2)).shift_period == 12
    assert (Window(9) & BigBird(4, 3, 2, 1)).shift_period is None


def test_joined_patterns_combine_masks():
    near, gaps = Window(5), Dilated(4, 3)
    assert torch.equal(all_pairs(near & gaps), all_pairs(near) & all_pairs(gaps))
    assert torch.equal(all_pairs(near | gaps), all_pairs(near) | all_pairs(gaps))
    some = (Strided(4, combination="by-head") & near).for_heads(2)
    assert [one.first for one in some] == list(Strided(4, combination="by-head").for_heads(2))


def test_global_token_patterns_cannot_be_joined():
    with pytest.raises(ValueError, match=r"Longformer\(.*\) has separate projections for global tokens"):
        Window(5) | Longformer()
    with pytest.raises(TypeError, match="a pattern can only be combined with another pattern, got 3"):
        Window(5) & 3


def test_joined_patterns_json_round_trips():
    spec = TransformerSpec(pattern=Window(5) | Dilated(3, 2) & Blockwise(4, 3, ((0, 1, 2),)))
    assert TransformerSpec.from_json(spec.to_json()) == spec


# BigBird's random blocks.


def blocks(pattern: BigBird, count: int, head: int) -> Tensor:
    first = torch.arange(count) * pattern.block
    rules = pattern.for_heads(head + 1)
    return rules[head % len(rules)].mask_mod(first[:, None], first)


@given(
    window=st.sampled_from([1, 3, 5]),
    random=st.integers(0, 9),
    global_blocks=st.integers(0, 3),
    seed=st.integers(0, 99),
    head=st.integers(0, 2),
    count=st.integers(1, 40),
)
@settings(max_examples=60)
def test_each_block_draws_the_requested_number_of_random_blocks(
    window, random, global_blocks, seed, head, count
):
    """Random blocks exclude global and window blocks, before and after the query; fewer where fewer exist."""
    pattern = BigBird(4, window, random, global_blocks, seed)
    seen = blocks(pattern, count, head)
    a, b = torch.arange(count)[:, None], torch.arange(count)
    is_global = (a < global_blocks) | (b < global_blocks)
    left = ~is_global & ((a - b).abs() > window // 2)
    assert seen[~left].equal((is_global | ((a - b).abs() <= window // 2))[~left])
    queries = torch.arange(count) >= global_blocks
    for some in (left, left & (b < a)):
        expected = some.sum(1).clamp(max=random)
        assert torch.equal((seen & some).sum(1)[queries], expected[queries])


def test_random_blocks_are_uniform():
    drawn = torch.stack([blocks(BigBird(1, 3, 3, 2, seed), 32, 0)[31, 2:30] for seed in range(1000)])
    assert (drawn.sum(1) == 3).all()
    assert (drawn.double().mean(0) - 3 / 28).abs().max() < 6 * (3 / 28 / 1000) ** 0.5


def test_blocks_of_global_tokens_are_not_drawn():
    pattern = BigBirdETC(2, 1, random=2, global_tokens=5)
    local = pattern.local.for_heads(1)[0]
    seen = local.mask_mod(torch.arange(40)[:, None], torch.arange(40))
    assert not seen[6:, :4].any()
    assert (seen[8:, 4:].sum(1) == 6).all()


def test_draws_depend_on_seed_and_head_but_not_length():
    pattern = BigBird(4, random=2)
    assert torch.equal(blocks(pattern, 40, 1)[:20, :20], blocks(pattern, 20, 1))
    assert not torch.equal(blocks(pattern, 40, 0), blocks(pattern, 40, 1))
    assert not torch.equal(blocks(pattern, 40, 0), blocks(replace(pattern, seed=1), 40, 0))


def test_draws_are_uniform():
    drawn = hash_uniform(3, torch.arange(200)[:, None], torch.arange(100))
    counts = (drawn.flatten() * 20).long().bincount(minlength=20)
    assert ((counts - 1000).abs() < 6 * 1000**0.5).all()
    assert abs(torch.corrcoef(torch.stack([drawn[:, :-1].flatten(), drawn[:, 1:].flatten()]))[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dilated(0), "Dilated size must be at least 1, got 0"),
        (lambda: Local2D(10, columns=4), "Local2D columns must divide width, got columns=4 and width=10"),
        (lambda: Strided(combination="both"), "Strided combination must be one of .* got 'both'"),
        (lambda: Strided(form="letter"), "Strided form must be one of .* got 'letter'"),
        (lambda: FixedColumns(4, 2, summaries=3), r"summaries \* columns <= stride, got 3 \* 2 > 4"),
        (
            lambda: Blockwise(4, 3, ((0, 1, 1),)),
            r"permutations must each contain 0 to 2 once, got \(0, 1, 1\)",
        ),
        (lambda: Longformer(5), "Longformer window must be even, got 5"),
        (lambda: BigBird(window=4), "BigBird window must be odd, got 4"),
        (lambda: ETC(global_tokens=0), "ETC global_tokens must be at least 1, got 0"),
    ],
)
def test_options_are_in_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
