"""Block-sparse attention with gathered keys equals dense attention, with memory below quadratic."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlxf.attention import (
    ETC,
    FIRE,
    KERPLE,
    XL,
    ALiBi,
    AttentionSinks,
    BigBird,
    BigBirdETC,
    Blockwise,
    CoPE,
    Deberta,
    Differential,
    Dilated,
    DistanceAware,
    ETCLabels,
    FixedColumns,
    Full,
    HeadPatterns,
    LayerPatterns,
    Local1D,
    Local2D,
    Longformer,
    RoPE,
    ShawRelative,
    Softmax,
    State,
    Strided,
    T5Bias,
    TokenIndex,
    Transformer,
    TransformerSpec,
    Tupe,
    Window,
    XLRelative,
    XPos,
)
from rlxf.attention.patterns.global_tokens import GlobalTokens
from rlxf.attention.positions.base import PairwisePosition
from rlxf.attention.registry import TECHNIQUES
from rlxf.attention.sparse import plan
from rlxf.attention.sparse.plan import (
    LRUCache,
    build_layout,
    build_span_layout,
    find_episode_spans,
    round_up_size,
)
from rlxf.attention.token_index import EMPTY
from tests.attention.largest_tensor import LargestTensor
from tests.attention.specs import SHORT, each, new_model
from tests.attention.worlds import numbers

SMALL = TransformerSpec(width=8, heads=2, layers=2, feed_forward=12)
LENGTH, START = 24, 52
"""Positions 52 to 75, which include the border of a group of 64."""

PATTERNS = (
    Full(),
    AttentionSinks(4, 2),
    Window(5),
    Dilated(3, 2),
    Dilated(3, 2, plain_heads=1),
    Local1D(4, 3),
    Local2D(12, 2, 3, 1, 2),
    Strided(4),
    Strided(4, combination="merged"),
    Strided(4, combination="by-head"),
    FixedColumns(4, 1),
    FixedColumns(4, 1, summaries=2),
    FixedColumns(4, 1, combination="by-head"),
    Blockwise(4, 3),
    ETC(3, 55),
    Longformer(4, global_tokens=54),
    Longformer((4, 8), (1, 2), global_tokens=(3, 55, 70)),
    Window((3, 6)),
    BigBird(4, 1, 2, 1),
    BigBird(4, 1, 2, 1, draw_sharing="layer"),
    BigBirdETC(4, 1, 2, 55),
    ETC(3, (3, 55, 70), global_input="given"),
    BigBird(4, 1, 2, (0, 5)),
    BigBirdETC(4, 1, 2, (3, 56, 57, 58, 59), global_input="given"),
    Window(3) | Dilated(2, 5),
    HeadPatterns(Window(5), Strided(4), 1),
    LayerPatterns(Window(5), HeadPatterns(Window(3), BigBird(4, 1, 2, 1), 1), (1,)),
)
"""The numbers of global tokens are near position 52, so that the segment contains some of them."""

POSITIONS = (
    RoPE(),
    ALiBi(),
    XLRelative(),
    ShawRelative(3),
    T5Bias(4, max_distance=5),
    Tupe(128, buckets=4, max_distance=5),
    Deberta(3),
    DistanceAware(),
    ETCLabels(3, global_tokens=54),
    XPos(scale_base=9.0),
    KERPLE(),
    FIRE(hidden=8, threshold=3.0),
    CoPE(3),
)

BY_LAYER = Strided | GlobalTokens | Window | LayerPatterns | HeadPatterns

SPECS = {
    repr(pattern): replace(SMALL, pattern=pattern, layers=2 if isinstance(pattern, BY_LAYER) else 1)
    for pattern in PATTERNS
}
"""Specs with two layers where the second differs from the first."""
ENCODERS = {f"encoder, {name}": replace(spec, causal=False) for name, spec in SPECS.items()}
WITH_POSITIONS = {
    f"{type(position).__name__}, {pattern}": replace(SMALL, layers=1, pattern=pattern, position=position)
    for position in POSITIONS
    for pattern in (Window(5), Dilated(3, 2, plain_heads=1), Longformer(4, global_tokens=54))
}
VARIANTS = {
    "RoPE, dynamic": replace(
        SMALL,
        pattern=Dilated(3, 2, plain_heads=1),
        position=RoPE(scaling="dynamic", factor=4.0, original_length=16),
    ),
    "softmax1": replace(SMALL, pattern=Window(5), kernel=Softmax(softmax1=True)),
    "multi-query, normalized, gated": replace(
        SMALL, pattern=Window(5), position=RoPE(), kv_heads=1, qk_norm="rms", attention_gate="elementwise"
    ),
    "multi-query, values by distance": replace(
        SMALL, pattern=Dilated(3, 2, plain_heads=1), position=ShawRelative(3), kv_heads=1
    ),
    "differential, multi-query, distances": replace(
        SMALL, pattern=Window(5), position=XLRelative(), kernel=Differential(), kv_heads=1
    ),
    "values by distance, bidirectional": replace(
        SMALL, pattern=Strided(4, combination="by-head"), position=ShawRelative(3), causal=False
    ),
}


def test_every_pattern_and_pairwise_position_is_covered():
    assert set(TECHNIQUES["pattern"].values()) <= {type(pattern) for pattern in PATTERNS}
    pairs = {one for one in TECHNIQUES["position"].values() if issubclass(one, PairwisePosition)}
    assert pairs <= {type(position) for position in POSITIONS}


def episodes() -> TokenIndex:
    """Return one row of two episodes with empty slots around them, and one row of one episode."""
    ends = [EMPTY] * 2 + [0] * 9 + [1] * 12 + [EMPTY]
    position = [0, 0, *range(START, START + 9), *range(START + 4, START + 16), 0]
    whole = list(range(START, START + LENGTH))
    return TokenIndex(torch.tensor([position, whole]), torch.tensor([ends, [0] * LENGTH]))


def outputs_and_gradients(model: Transformer, state: State | None, index: TokenIndex) -> list[Tensor]:
    """Return outputs of non-empty slots and all gradients of a pass."""
    x = numbers(*index.shape, model.spec.width).requires_grad_()
    y, _ = model(x, index, state)
    filled = y[index.episode != EMPTY]
    (filled * numbers(*filled.shape, seed=1)).sum().backward()
    assert x.grad is not None
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return [filled.detach(), x.grad, *gradients]


def compare_sparse_with_dense(
    monkeypatch: pytest.MonkeyPatch,
    model: Transformer,
    state: State | None = None,
    index: TokenIndex | None = None,
) -> None:
    index = index or episodes()
    monkeypatch.setattr(plan, "MIN_SAVING", 0)
    results = []
    for small in (2**40, 0):
        monkeypatch.setattr(plan, "MIN_SPARSE_PAIRS", small)
        relation = model.attention_mask(index, index)
        assert (relation.sparse_plan is None) == (small > 0)
        results.append(outputs_and_gradients(model, state, index))
    for dense, sparse in zip(*results, strict=True):
        torch.testing.assert_close(sparse, dense, rtol=1e-9, atol=1e-9)


WITH_KERNELS = {
    f"{name}, {pattern}": replace(SMALL, layers=1, pattern=pattern, kernel=SHORT.get(name) or technique())
    for name, technique in TECHNIQUES["kernel"].items()
    for pattern in (Window(5), Dilated(5, 2, plain_heads=1))
}


@each(SPECS | ENCODERS | WITH_POSITIONS | WITH_KERNELS | VARIANTS)
def test_sparse_equals_dense_attention(spec, monkeypatch):
    compare_sparse_with_dense(monkeypatch, new_model(spec).double())


BY_HEAD = (
    Dilated(3, 2, plain_heads=1),
    Strided(4, combination="by-head"),
    FixedColumns(4, 1, combination="by-head"),
    FixedColumns(4, 1, combination="by-head", summaries=2),
    Blockwise(4, 3),
    Blockwise(4, 3, ((1, 2, 0),)),
    Longformer(4, 2, plain_heads=1),
    BigBird(4, 1, 2, 1),
    HeadPatterns(Window(5), FixedColumns(4, 1, combination="by-layer").for_layer(1), 1),
    HeadPatterns(Blockwise(4, 3), Full(), 1),
)


@pytest.mark.parametrize("length", [1, 3, 4, 9])
@each({repr(pattern): replace(SMALL, heads=4, layers=1, pattern=pattern) for pattern in BY_HEAD})
def test_heads_without_visible_keys_at_the_start_of_an_episode(spec, length, monkeypatch):
    """Some heads, but not all, see no key in a short episode, and have no block group."""
    index = TokenIndex.range(2, length)
    compare_sparse_with_dense(monkeypatch, new_model(spec).double(), index=index)


@pytest.mark.parametrize("length", [255, 256, 300, 448])
def test_default_blockwise_with_few_blocks(length):
    """Heads that see later blocks only are 0, at lengths where block-sparse attention is chosen."""
    model, x = (
        new_model(replace(SMALL, heads=8, pattern=Blockwise())),
        numbers(1, length, SMALL.width).float(),
    )
    y, _ = model(x, TokenIndex.range(1, length))
    assert y.isfinite().all()


@each(SPECS)
def test_time_major_index(spec, monkeypatch):
    """An index may be a transposed view of a rollout (T, B)."""
    monkeypatch.setattr(plan, "MIN_SAVING", 0)
    monkeypatch.setattr(plan, "MIN_SPARSE_PAIRS", 0)
    model, index = new_model(spec).double(), episodes()
    x = numbers(*index.shape, spec.width)
    time_major = TokenIndex(*(part.t().contiguous().t() for part in (index.position, index.episode)))
    torch.testing.assert_close(model(x, time_major)[0], model(x, index)[0])


MEMORY_PATTERNS = (Window(5), Dilated(3, 2, plain_heads=1), Blockwise(4, 3), Longformer(4, global_tokens=54))


@each({repr(pattern): replace(SMALL, pattern=pattern, memory=XL(5)) for pattern in MEMORY_PATTERNS})
def test_memory(spec, monkeypatch):
    where = TokenIndex(
        torch.tensor([[0, 0, 0, 0, 0], range(START - 5, START)]), torch.tensor([[EMPTY] * 5, [0] * 5])
    )
    state = State(numbers(spec.layers, 2, 5, spec.width, seed=2), where)
    compare_sparse_with_dense(monkeypatch, new_model(spec).double(), state)


@each({"XLRelative": replace(SMALL, pattern=Window(5), position=XLRelative())})
def test_subset_of_queries(spec, monkeypatch):
    """A Decision Transformer needs the output of every third token."""
    monkeypatch.setattr(plan, "MIN_SAVING", 0)
    model, index = new_model(spec).double(), TokenIndex.range(2, 30, start=50)
    x, results = numbers(2, 30, spec.width), []
    for small in (2**40, 0):
        monkeypatch.setattr(plan, "MIN_SPARSE_PAIRS", small)
        results.append(model.encode(x, index, output_slice=slice(1, None, 3))[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


@each(
    {repr(pattern): replace(SMALL, layers=1, pattern=pattern) for pattern in MEMORY_PATTERNS[:2]}
    | {"Differential": replace(SMALL, layers=1, pattern=Window(5), kernel=Differential())}
)
def test_all_slots_empty_gives_finite_outputs(spec, monkeypatch):
    """Memory of a Decision Transformer is empty if all windows lie in short episodes."""
    monkeypatch.setattr(plan, "MIN_SPARSE_PAIRS", 0)
    model, index = new_model(spec).double(), TokenIndex.empty(2, 30, torch.device("cpu"))
    assert model.attention_mask(index, index).sparse_plan is not None
    y, _ = model(numbers(2, 30, spec.width), index)
    assert y.isfinite().all()


@pytest.mark.parametrize(
    "index",
    [
        TokenIndex(torch.tensor([[0, 2, 3]]), torch.tensor([[0, 0, 0]])),
        TokenIndex(torch.tensor([[0, 1, 0, 2]]), torch.tensor([[0, 0, 1, 0]])),
    ],
    ids=["gap", "torn"],
)
def test_irregular_layout_is_dense(index, monkeypatch):
    monkeypatch.setattr(plan, "MIN_SPARSE_PAIRS", 0)
    monkeypatch.setattr(plan, "MIN_SAVING", 0)
    assert new_model(SMALL).attention_mask(index, index).sparse_plan is None


LONG = 512
ONE = replace(SMALL, layers=1, heads=1)
SHORT_REACH = {
    repr(pattern): replace(ONE, pattern=pattern)
    for pattern in (
        Window(17),
        Dilated(9, 4),
        Local1D(16, 16),
        Local2D(32, 4, 4, 2, 2),
        Strided(32, "merged"),
        FixedColumns(32, 1),
        Blockwise(16, 4),
        ETC(16, 2),
        Longformer(32),
        BigBird(16),
        BigBirdETC(16),
    )
} | {
    f"{type(position).__name__}, {pattern}": replace(ONE, pattern=pattern, position=position)
    for position in (
        ALiBi(),
        XLRelative(),
        ShawRelative(3),
        T5Bias(),
        Tupe(LONG),
        Deberta(3),
        DistanceAware(),
        XPos(),
        KERPLE(),
        FIRE(hidden=1),
        CoPE(3),
    )
    for pattern in (Window(17), Longformer(32))
}


@each(SHORT_REACH)
def test_memory_is_below_quadratic(spec):
    model, x = new_model(spec), numbers(1, LONG, spec.width, dtype=torch.float32)
    with LargestTensor() as largest:
        y, _ = model(x, TokenIndex.range(1, LONG))
        y.sum().backward()
    assert LONG * spec.width <= largest.size < LONG**2 / 3


def test_patterns_with_small_savings_are_dense():
    index, both_ways = TokenIndex.range(1, LONG), replace(SMALL, causal=False)
    assert new_model(SMALL).attention_mask(index, index).sparse_plan is not None
    assert new_model(both_ways).attention_mask(index, index).sparse_plan is None
    assert (
        new_model(replace(both_ways, pattern=Window(LONG // 2))).attention_mask(index, index).sparse_plan
        is None
    )


@pytest.mark.parametrize("causal", [True, False])
def test_groups_that_see_all_keys_are_not_built_where_dense_attention_is_faster(causal, monkeypatch):
    groups = []
    monkeypatch.setattr(plan, "LARGE_PAIRS", LONG**2)
    monkeypatch.setattr(plan, "group_span", lambda *args: groups.append(args) or [])
    index = TokenIndex.range(1, LONG)
    assert new_model(replace(SMALL, causal=causal)).attention_mask(index, index).sparse_plan is None
    assert not groups


@pytest.mark.parametrize("causal", [True, False])
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3), st.integers(1, 9)), max_size=3), st.data())
def test_number_of_visible_pairs(causal, queries, data):
    spans, pairs = {}, 0
    for start, step, count in queries:
        first = data.draw(st.integers(0, 40))
        span = plan.EpisodeSpan(
            range(start, start + step * count, step), range(first, first + data.draw(st.integers(1, 30)))
        )
        spans[span] = [(0, 0)] * data.draw(st.integers(1, 2))
    for span, offsets in spans.items():
        pairs += len(offsets) * sum(not causal or i >= j for i in span.queries for j in span.keys)
    assert plan.count_visible_pairs(causal, spans) == pairs


def test_rounded_sizes_are_few_and_close():
    sizes = [round_up_size(size) for size in range(1, 5000)]
    assert all(size <= least < 1.25 * size for size, least in enumerate(sizes, start=1))
    assert len(set(sizes)) < 50


def test_spans_of_equal_length_share_one_layout(monkeypatch):
    """The layout of patterns with period 1 is independent of the position in the episode."""
    made = []
    fresh_cache = LRUCache(
        lambda *args: made.append(args) or build_span_layout.function(*args), 2**20, build_span_layout.size
    )
    monkeypatch.setattr(plan, "build_span_layout", fresh_cache)
    starts = torch.tensor([0, 7, 64, 1000])[:, None]
    index = TokenIndex(starts + torch.arange(LENGTH), torch.zeros(4, LENGTH, dtype=torch.long))
    for _ in range(2):
        build_layout(Window(5), True, find_episode_spans(index, index), torch.device("cpu"))
    assert len(made) == 1


@pytest.mark.parametrize("capacity", [0, 3, 8])
def test_cache_evicts_the_least_recently_used_results(capacity):
    made = []
    double = LRUCache(lambda n: made.append(n) or 2 * n, capacity, size=lambda result: 1)
    numbers = [0, 1, 2, 0, 3, 1, 0]
    assert [double(n) for n in numbers] == [2 * n for n in numbers]
    assert made == {0: numbers, 3: [0, 1, 2, 3, 1], 8: [0, 1, 2, 3]}[capacity]
    assert double.bytes <= capacity
