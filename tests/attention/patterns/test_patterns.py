"""Tests of patterns: maximum distance, candidate keys, groups, periods and random blocks."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlxf.attention import (
    ETC,
    GRU,
    AttentionSinks,
    BigBird,
    BigBirdETC,
    Blockwise,
    Dilated,
    ETCLabels,
    FixedColumns,
    Full,
    HeadPatterns,
    LayerPatterns,
    Local1D,
    Local2D,
    Longformer,
    Strided,
    TokenIndex,
    TransformerSpec,
    Universal,
    Window,
)
from rlxf.attention.patterns import big_bird
from rlxf.attention.patterns.base import UNLIMITED, Pattern
from rlxf.attention.patterns.big_bird import hash_uniform
from rlxf.attention.patterns.window import limit_distance
from rlxf.attention.registry import TECHNIQUES
from tests.attention.specs import new_model

HEADS, LAYERS, LENGTH = 3, 2, 96

PATTERNS = [
    Full(),
    Window(7),
    Window((3, 9)),
    Window((4, 9)) & Dilated(3, 4),
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
    Longformer((4, 8), (1, 3), 1, global_tokens=(0, 5, 70)),
    Longformer(4, (1, 2), farthest=7),
    Longformer((2, 4), global_tokens=(9, 2), farthest=11),
    BigBird(4, 3, 2, 1),
    BigBird(4, 3, 0, 0),
    BigBird(4, 3, 2, 1, draw_sharing="layer"),
    BigBird(8, 1, 2, 1, given_blocks=(((), (5, 3), (4,), (1, 5), (), ()), ((), (4, 3), (), (), (2, 1), ()))),
    BigBirdETC(4, 1, 2, 3, draw_sharing="layer"),
    BigBirdETC(4, 1, 2, 3),
    ETC(4, 3, 7),
    ETC(4, 3, 2),
    ETC(4, (0, 7, 40)),
    ETC(4, (9, 2, 50), farthest=30, segments=(30, 9, 20), global_input="given"),
    BigBird(4, 3, 2, (0, 5, 11)),
    BigBird(4, 1, 3, (2, 20), draw_sharing="layer"),
    BigBirdETC(4, 1, 2, (3, 8, 9, 10, 11, 60)),
    ETC(4, 3, segments=(30, 9, 20)),
    ETC(4, 3, farthest=40, segments=30, global_input="given"),
    Longformer(6, global_tokens=2, farthest=9),
    BigBirdETC(4, 1, 2, 3, farthest=11),
    Window(9) & Dilated(3, 4),
    Window(3) | Local1D(8, 2) | Strided(7, combination="by-head"),
    HeadPatterns(Window((3, 6)), Dilated(3, 4), 2),
    LayerPatterns(Window(5), Strided(7, combination="by-head"), (1,)),
    AttentionSinks(5, 3),
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


# Patterns that derive from others.


def even(kind: type[Pattern]) -> type[Pattern]:
    """Return a subclass of a pattern that hides keys at odd distances."""

    @dataclass(frozen=True)
    class Even(kind):
        def mask_mod(self, i: Tensor, j: Tensor) -> Tensor:
            return super().mask_mod(i, j) & ((i - j) % 2 == 0)

    return Even


@pytest.mark.parametrize(
    "pattern",
    [
        Full(),
        Window((3, 8)),
        Dilated(4, 2),
        Dilated(4, 2, plain_heads=1),
        AttentionSinks(5, 3),
        Local1D(6, 4),
    ],
    ids=repr,
)
def test_layers_and_heads_keep_an_overridden_rule(pattern):
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    own = even(type(pattern))(**vars(pattern))
    for rule, base in zip(rules(own), rules(pattern), strict=True):
        visible = all_pairs(base) & (distance % 2 == 0)
        assert torch.equal(all_pairs(rule), visible)
        assert torch.equal(all_pairs(limit_distance(rule, 4)), visible & (distance.abs() <= 4))


@pytest.mark.parametrize("pattern", [even(Full)(), even(Window)(5), even(even(Window))(5)])
def test_overridden_rule_inherits_no_shortcuts(pattern):
    assert not pattern.allows_all_keys
    assert not pattern.is_uniform_window
    assert pattern.shift_period is None


def test_subclass_may_define_its_own_shortcuts():
    class Near(even(Full)):
        shift_period = 2

    assert Near().shift_period == 2
    assert not Near().allows_all_keys


# Windows by layer, and global tokens at given positions.


def test_windows_by_layer():
    growing = Window((2, 5, 9))
    assert [growing.for_layer(layer) for layer in range(4)] == [Window(2), Window(5), Window(9), Window(2)]
    assert growing.within(5) == Window((2, 5, 6))
    assert growing.within(1) == Window(2)
    joined = growing | Strided(4, combination="by-head")
    assert joined.for_layer(1).first == Window(5)


def test_longformer_by_layer():
    pattern = Longformer((4, 8), (1, 3), 1, global_tokens=(3,), farthest=9)
    expected = [Longformer(4, 1, 1, (3,), 9), Longformer(8, 3, 1, (3,), 9)]
    assert [pattern.for_layer(layer) for layer in range(3)] == [*expected, expected[0]]
    assert Longformer((4, 8), 2).for_layer(1) == Longformer(8, 2)


def test_layers_of_a_transformer_use_their_windows():
    """The mask of each layer is that of the paper's windows, computed pair by pair."""
    spec = TransformerSpec(width=8, heads=2, layers=3, pattern=Longformer((2, 4, 4), (1, 1, 2), 1, (1, 4)))
    index = TokenIndex.range(1, 12)
    masks = new_model(spec).attention_masks(index, index)
    for (window, dilation), mask in zip([(2, 1), (4, 1), (4, 2)], masks, strict=True):
        for head, gap in enumerate([1, dilation]):
            for i in range(12):
                for j in range(12):
                    far = i - j
                    local = 0 <= far <= window // 2 * gap and far % gap == 0
                    seen = local or (far >= 0 and (i in (1, 4) or j in (1, 4)))
                    allowed = mask.allowed_by_head.expand(-1, 2, -1, -1)
                    assert bool(allowed[0, head, i, j]) == seen


def test_positions_of_global_tokens_are_sorted():
    assert Longformer(global_tokens=[5, 0]) == Longformer(global_tokens=(0, 5))
    first = Longformer(4, global_tokens=(0, 1, 2))
    assert torch.equal(all_pairs(first), all_pairs(Longformer(4, global_tokens=3)))


@pytest.mark.parametrize("pattern", [Window((3, 5, 9)), Longformer((2, 4, 6)), Longformer(2, (1, 2, 3))])
def test_more_windows_than_layers_raise(pattern):
    message = r"has 3 values of (size|window|dilation), and the transformer has layers=2; .* set layers=3"
    with pytest.raises(ValueError, match=message):
        TransformerSpec(layers=2, pattern=pattern)
    assert TransformerSpec(layers=3, pattern=pattern).pattern == pattern
    if isinstance(pattern, Window):
        with pytest.raises(ValueError, match=message):
            TransformerSpec(layers=2, pattern=Full() & pattern)


def test_labels_need_the_global_tokens_of_the_pattern():
    with pytest.raises(ValueError, match=r"disagree on the global tokens; set ETCLabels .*=\(0, 3\)"):
        TransformerSpec(pattern=Longformer(global_tokens=(0, 3)), position=ETCLabels(global_tokens=2))


# BigBird's random blocks.


def blocks(pattern: BigBird, count: int, head: int) -> Tensor:
    first = torch.arange(count) * pattern.block
    rules = pattern.for_heads(head + 1)
    return rules[head % len(rules)].mask_mod(first[:, None], first)


@given(
    window=st.sampled_from([1, 3, 5]),
    random=st.integers(0, 9),
    global_blocks=st.integers(0, 3) | st.sets(st.integers(0, 12), min_size=1, max_size=4).map(tuple),
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
    numbers = range(global_blocks) if isinstance(global_blocks, int) else global_blocks
    row_is_global = torch.tensor([block in numbers for block in range(count)])
    is_global = row_is_global[:, None] | row_is_global
    left = ~is_global & ((a - b).abs() > window // 2)
    assert seen[~left].equal((is_global | ((a - b).abs() <= window // 2))[~left])
    queries = ~row_is_global
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


@pytest.mark.parametrize("pattern", [BigBird(4, random=2), BigBirdETC(4, random=2)], ids=repr)
def test_layers_have_their_own_draws(pattern):
    own = replace(pattern, draw_sharing="layer")
    layers = [own.for_layer(layer).for_heads(1)[0] for layer in range(3)]
    first, second, third = (all_pairs(rule) for rule in layers)
    assert torch.equal(first, all_pairs(pattern.for_heads(1)[0]))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert pattern.for_layer(1) == pattern


def test_blocks_are_drawn_once(monkeypatch):
    """Deep transformers draw for each head of each layer."""
    rules = [
        rule
        for layer in range(24)
        for rule in BigBird(4, draw_sharing="layer", seed=77).for_layer(layer).for_heads(8)
    ]
    position = torch.arange(40)
    first = [rule.mask_mod(position[:, None], position) for rule in rules]
    monkeypatch.setattr(big_bird, "hash_uniform", None)
    second = [rule.mask_mod(position[:, None], position) for rule in rules]
    assert torch.equal(torch.stack(first), torch.stack(second))


def test_given_blocks_are_those_of_the_mask():
    drawn = (((), (3,), (), (1, 4), (), (), ()), ((), (), (4, 5), (), (), (), ()))
    pattern = BigBird(2, 3, 2, 1, given_blocks=drawn)
    for head in range(3):
        seen = blocks(pattern, 9, head)
        for a in range(9):
            expected = {b for b in range(9) if abs(a - b) <= 1 or {a, b} & {0, 6}}
            expected |= set(drawn[head % 2][a]) if a < 7 else set()
            assert set(seen[a].nonzero()[:, 0].tolist()) == (set(range(9)) if a in (0, 6) else expected)


SWAPPED = (0, 1), (1, 0)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"pattern": Dilated(3, 2, plain_heads=4)}, r"plain_heads of Dilated\(.* less than heads=4"),
        ({"pattern": Dilated(3, 1, plain_heads=1)}, "no effect with dilation=1; set plain_heads=0"),
        ({"pattern": Longformer(4, 1, plain_heads=2)}, r"Longformer\(.* no effect with dilation=1"),
        ({"pattern": Longformer(4, (1, 2), plain_heads=9)}, r"Longformer\(.* less than heads=4"),
        ({"pattern": Blockwise(2, 2, SWAPPED * 3)}, "has 6 permutations for 4 heads.* give at most 4"),
        ({"pattern": BigBird(2, given_blocks=(((),) * 3,) * 9)}, "has 9 entries of given_blocks for 4 heads"),
        ({"pattern": FixedColumns(8, 1, "merged", 8)}, "has 8 summaries for 4 heads"),
        ({"pattern": FixedColumns(8, 1, "by-head", 3)}, "has 3 summaries for 2 heads"),
        ({"pattern": Strided(4, "by-head"), "heads": 1}, "two rules by head, .* heads=1; set .*'merged'"),
        (
            {"pattern": Strided(4, "by-layer"), "layers": 1},
            "by layer, and with layers=1 .* only one",
        ),
        (
            {"pattern": Strided(4), "layers": 4, "recurrence": GRU(), "attention_layers": (1, 3)},
            "the layers with attention use only one of them",
        ),
        ({"pattern": Window(9) & Strided(4, "by-head"), "heads": 1}, "two rules by head"),
    ],
)
def test_options_without_effect_raise(choices, message):
    with pytest.raises(ValueError, match=message):
        TransformerSpec(**choices)


@pytest.mark.parametrize(
    "choices",
    [
        {"pattern": Dilated(3, 2, plain_heads=3)},
        {"pattern": Longformer(4, (1, 2), plain_heads=1)},
        {"pattern": Blockwise(2, 2, SWAPPED * 2)},
        {"pattern": FixedColumns(8, 1, "by-head", 2)},
        {"pattern": Strided(4), "layers": 3, "recurrence": GRU(), "attention_layers": (1, 2)},
        {"pattern": Strided(4), "depth": Universal()},
    ],
)
def test_options_with_effect_are_accepted(choices):
    spec = TransformerSpec(**choices)
    assert TransformerSpec.from_json(spec.to_json()) == spec


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
        (lambda: Longformer((4, 5)), r"Longformer window must be even, got \(4, 5\)"),
        (
            lambda: Longformer((4, 6), (1, 2, 3)),
            r"window=\(4, 6\) and dilation=\(1, 2, 3\) must have the same number",
        ),
        (lambda: Longformer(global_tokens=()), r"global_tokens must be different positions, .* got \(\)"),
        (lambda: Longformer(global_tokens=(2, 2)), r"different positions, at least one, got \(2, 2\)"),
        (lambda: Longformer(global_tokens=(-1,)), "position in global_tokens must be at least 0, got -1"),
        (lambda: Window(()), r"Window size must be a number or a tuple of numbers, .* got \(\)"),
        (lambda: Window((3, 0)), "Window size must be at least 1, got 0"),
        (lambda: BigBird(window=4), "BigBird window must be odd, got 4"),
        (lambda: BigBird(draw_sharing="head"), "BigBird draw_sharing must be one of .* got 'head'"),
        (
            lambda: BigBird(random=1, given_blocks=(((1, 0), ()),)),
            r"given_blocks must have at most random=1 different numbers from 0 to 1 .* got \(1, 0\)",
        ),
        (lambda: BigBird(given_blocks=(((2,), ()),)), r"from 0 to 1 for each block, got \(2,\)"),
        (lambda: BigBird(given_blocks=(((), ()), ((),))), "the same number of blocks for each head"),
        (
            lambda: BigBird(given_blocks=(((), ()),), draw_sharing="layer"),
            "given for all layers; set draw_sharing='shared'",
        ),
        (lambda: ETC(global_tokens=0), "ETC global_tokens must be at least 1, got 0"),
    ],
)
def test_options_are_in_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
