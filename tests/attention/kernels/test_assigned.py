"""Kernels and patterns by head and by layer equal their parts, computed separately."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    LSH,
    RFA,
    XL,
    AdaptiveSpan,
    ALiBi,
    BigBird,
    Blockwise,
    Context,
    Differential,
    Dilated,
    DynamicSpan,
    Full,
    HeadKernels,
    HeadPatterns,
    LayerKernels,
    LayerPatterns,
    Linformer,
    Performer,
    RoPE,
    Routing,
    Softmax,
    Strided,
    T5Bias,
    TokenIndex,
    TransformerSpec,
    Window,
)
from rlxf.attention.attention import LayerCache
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.base import Kernel
from rlxf.attention.kernels.linear_attention import LinearAttentionState
from rlxf.attention.sparse import plan
from tests.attention.oracle import close
from tests.attention.specs import DEFAULT, new_model
from tests.attention.worlds import numbers

HEADS, SIZE, LENGTH = 4, 3, 20
ROUTED = HeadKernels(Softmax(), Routing(2), 2)
LOCAL_AND_FULL = HeadPatterns(Window(4), Full(), 2)


def mask_of(pattern, heads: int = HEADS) -> AttentionMask:
    index = TokenIndex.range(2, LENGTH)
    return AttentionMask(index, index, pattern, True, torch.float64, heads=heads)


def run(kernel: Kernel, heads: int, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Return the outputs of a kernel that is built for these heads only."""
    module = kernel.build(heads * SIZE, heads).double()
    q, k = (
        x if extra is None else torch.cat([x, extra], dim=-1)
        for x, extra in ((q, module.projected_query_extras(q)), (k, module.projected_key_extras(k)))
    )
    return mask.zero_masked_rows(module(q, k, v, None, mask))


@pytest.mark.parametrize("pattern", [Full(), LOCAL_AND_FULL], ids=repr)
def test_heads_equal_those_of_their_kernels(pattern):
    q, k, v = (numbers(2, HEADS, LENGTH, SIZE, seed=seed) for seed in range(3))
    whole = run(ROUTED, HEADS, q, k, v, mask_of(pattern))
    rules = pattern.for_heads(HEADS)
    for part, kernel, rule in (
        (slice(0, 2), Softmax(), rules[0]),
        (slice(2, 4), Routing(2), rules[-1]),
    ):
        expected = run(kernel, 2, q[:, part], k[:, part], v[:, part], mask_of(rule, 2))
        torch.testing.assert_close(whole[:, part], expected)


def test_parts_are_block_sparse_where_that_is_faster(monkeypatch):
    """Long sequences give the same outputs as dense attention."""
    spec = replace(
        DEFAULT, kernel=HeadKernels(Softmax(), Routing(2), 1), pattern=HeadPatterns(Window(4), Full(), 1)
    )
    model, x, index = new_model(spec).double(), numbers(1, 300, 8), TokenIndex.range(1, 300)
    sparse = model.outputs(x, index)
    first = model.attention_mask(index, index)
    assert first.sparse_plan is not None
    monkeypatch.setattr(plan, "MIN_SPARSE_PAIRS", 2**60)
    torch.testing.assert_close(model.outputs(x, index), sparse)


def test_auxiliary_losses_are_those_of_the_parts():
    spec = replace(DEFAULT, kernel=HeadKernels(AdaptiveSpan(limit=4, ramp=2, penalty=1.0), Softmax(), 1))
    model = new_model(spec)
    model.outputs(numbers(1, 5, 8, dtype=torch.float32), TokenIndex.range(1, 5))
    expected = sum(block.attention.kernel.parts[0].z.mean() for block in model.blocks)
    torch.testing.assert_close(model.penalty(), expected)


def test_routed_centroids_move_after_an_update():
    model = new_model(replace(DEFAULT, kernel=HeadKernels(Softmax(), Routing(2, decay=0.5), 1))).train()
    routed = model.blocks[0].attention.kernel.parts[1]
    before = routed.centroids.clone()
    model.outputs(numbers(1, 9, 8, dtype=torch.float32), TokenIndex.range(1, 9)).sum().backward()
    model.after_update()
    assert routed.centroids.shape == (1, 2, 4)
    assert not torch.equal(before, routed.centroids)


def test_layers_have_their_kernels_and_patterns():
    spec = TransformerSpec(
        layers=4,
        kernel=LayerKernels(Softmax(), ROUTED, (2, 3)),
        pattern=LayerPatterns(Window(5), LOCAL_AND_FULL, (2, 3)),
    )
    kinds = [type(block.attention.kernel).__name__ for block in spec.build().blocks]
    assert kinds == ["SoftmaxAttention"] * 2 + ["HeadKernelAttention"] * 2
    assert [spec.pattern.for_layer(n) for n in range(4)] == [Window(5)] * 2 + [LOCAL_AND_FULL] * 2
    assert TransformerSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("kernel", "pattern", "expected"),
    [
        (LayerKernels(Softmax(), Performer(6), (1,)), Full(), [LayerCache, LinearAttentionState]),
        (LayerKernels(RFA(8, gate=True), Softmax(), (1,)), Full(), [LinearAttentionState, LayerCache]),
        (Performer(6), LayerPatterns(Full(), Window(9), (1,)), [LinearAttentionState, LayerCache]),
        (LayerKernels(RFA(8), Performer(6), (1,)), Full(), [LinearAttentionState] * 2),
    ],
    ids=repr,
)
def test_each_layer_acts_from_its_own_kind_of_cache(kernel, pattern, expected):
    """A layer with running sums attends to the whole episode, whatever the number of slots of the others."""
    spec = replace(DEFAULT, kernel=kernel, pattern=pattern, position=RoPE())
    model, x, index = new_model(spec).double(), numbers(2, LENGTH, spec.width), TokenIndex.range(2, LENGTH)
    cache = model.cache(model.initial_state(2), LENGTH)
    assert [type(layer) for layer in cache.layers] == expected
    y = [model.step(x[:, t], index.at(slice(t, t + 1)), cache)[0] for t in range(LENGTH)]
    close(torch.stack(y, dim=1), model(x, index)[0])


def test_tied_weights_are_those_of_the_same_kernel():
    """Layers with another kernel do not take part in `Linformer`'s sharing."""
    kernel = LayerKernels(Softmax(), Linformer(2, 1, sharing="layer"), (1, 2))
    blocks = TransformerSpec(layers=3, kernel=kernel).build().blocks
    assert blocks[1].attention.kernel.key_projection is blocks[2].attention.kernel.key_projection


def test_weights_are_tied_among_equal_specs_only():
    """Layers of both specs alternate; only layers with an equal spec share."""
    shared, other = Linformer(4, 2, sharing="layer"), Linformer(4, 2, "mean", sharing="layer")
    for first in (Linformer(4, 2, sharing="head"), Linformer(8, 2, sharing="layer"), other):
        model = new_model(replace(DEFAULT, layers=4, kernel=LayerKernels(first, shared, (1, 3))))
        kernels = [block.attention.kernel for block in model.blocks]
        assert kernels[1].key_projection is kernels[3].key_projection is not kernels[0].key_projection
        assert (kernels[0].key_projection is kernels[2].key_projection) == (first.sharing == "layer")
        model(numbers(1, 20, DEFAULT.width).float(), TokenIndex.range(1, 20))


@pytest.mark.parametrize("position", [None, ALiBi(), T5Bias(4, max_distance=5)], ids=repr)
def test_layers_with_several_maps_share_masks_and_biases(position):
    kernel = LayerKernels(Differential(), Differential(0.5), (1,))
    spec = replace(DEFAULT, kernel=kernel, position=position, pattern=Strided(3, "by-head"))
    assert spec.score_heads == 2 * spec.heads
    assert new_model(spec)(numbers(1, 9, spec.width).float(), TokenIndex.range(1, 9))[0].isfinite().all()


@pytest.mark.parametrize("small", [0, 1 << 16], ids=["gathered", "all pairs"])
@pytest.mark.parametrize(
    "pattern",
    [HeadPatterns(Window(3), Full(), 1), Strided(3, "by-head"), Blockwise(4, 3), BigBird(2, 1, 1, 0)],
    ids=repr,
)
def test_both_maps_of_a_head_have_its_pattern(pattern, small, monkeypatch):
    """The masks of 2 H maps are those of the H heads, each twice; keys are gathered for the same ones."""
    monkeypatch.setattr(plan, "MIN_SPARSE_PAIRS", small)
    monkeypatch.setattr(plan, "MIN_SAVING", 0)
    spec, index = replace(DEFAULT, heads=2, kernel=Differential(), pattern=pattern), TokenIndex.range(2, 24)
    model, of_heads = new_model(spec).double(), mask_of(pattern, 2)
    mask = model.attention_mask(of_heads.query, of_heads.key)
    assert torch.equal(mask.allowed_by_head, of_heads.allowed_by_head.repeat_interleave(2, dim=1))
    x = numbers(2, 24, spec.width)
    sparse = model(x, index)[0]
    monkeypatch.setattr(plan, "MIN_SPARSE_PAIRS", 2**40)
    torch.testing.assert_close(model(x, index)[0], sparse)


def test_patterns_by_head():
    first, second = Dilated(2, 2, plain_heads=1), Window(3)
    assert HeadPatterns(first, second, 1).for_heads(4) == (*first.for_heads(4)[:3], second)
    assert HeadPatterns(Window((2, 5)), second, 1).for_layer(1).for_heads(2) == (Window(5), second)
    assert HeadPatterns(Window(9), Full(), 2).max_distance == Full().max_distance


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"kernel": HeadKernels(Softmax(), Routing(), 4)},
            r"HeadKernels\(.* leaves no head .* heads=4; use fewer",
        ),
        (
            {"heads": 1, "pattern": HeadPatterns(Full(), Window(), 1)},
            r"HeadPatterns\(.* leaves no head .* heads=1; use the second choice alone$",
        ),
        ({"pattern": HeadPatterns(Full(), Window(), 9)}, r"HeadPatterns\(.* leaves no head .* heads=4"),
        ({"kernel": LayerKernels(Softmax(), Routing(), (2,))}, r"LayerKernels\(.* needs layers from 0 to 1"),
        (
            {"pattern": LayerPatterns(Full(), Window(), (0, 1))},
            r"LayerPatterns\(.* not all of them.* layers=2",
        ),
        (
            {"kernel": LayerKernels(Softmax(), Differential(), (1,))},
            r"heads=4, Softmax\(.* computes 4 attention maps and Differential\(.* computes 8; use kernels",
        ),
        (
            {"kernel": LayerKernels(Softmax(), LSH(), (1,)), "cross_attention": True},
            "LSH.* choose another kernel",
        ),
    ],
)
def test_incompatible_settings_raise(choices, message):
    with pytest.raises(ValueError, match=message):
        TransformerSpec(**{"heads": 4, "layers": 2, **choices})


@pytest.mark.parametrize("kernel", [LSH(), RFA(), Performer(), Linformer()], ids=repr)
def test_kernels_without_pairs_are_refused_by_head(kernel):
    with pytest.raises(ValueError, match=r"HeadKernels needs .* does not; use Softmax, .*LayerKernels"):
        HeadKernels(Softmax(), kernel, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: HeadKernels(Softmax(), Full(), 1),
            "combined with another kernel, got Full",
        ),
        (lambda: HeadKernels(Softmax(), Routing(), 0), "HeadKernels heads must be at least 1, got 0"),
        (
            lambda: LayerKernels(Softmax(), Routing(), ()),
            r"layers must be different .* got \(\)",
        ),
        (lambda: LayerKernels(Softmax(), Routing(), (1, 1)), r"layers must be different .* got \(1, 1\)"),
        (lambda: LayerKernels(Softmax(), Routing(), 1), "LayerKernels layers must be a tuple of .* got 1"),
        (lambda: LayerPatterns(Full(), Window(), (-1,)), "LayerPatterns layers must be at least 0, got -1"),
        (lambda: HeadPatterns(Full(), Softmax(), 1), "a pattern can only be combined with another pattern"),
    ],
)
def test_options_are_in_range(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_memory_search_needs_softmax_in_all_heads():
    assert HeadKernels(Softmax(), Softmax(softmax1=True), 1).softmax_distance == Softmax().softmax_distance
    assert HeadKernels(Softmax(), Routing(), 1).softmax_distance == 0
    assert LayerKernels(Softmax(), DynamicSpan(limit=9), (1,)).softmax_distance == 9
    spec = TransformerSpec(kernel=HeadKernels(Softmax(), AdaptiveSpan(), 1), memory=XL(4), pattern=Window(5))
    assert TransformerSpec.from_json(spec.to_json()) == spec


def test_dropout_of_attention_weights_reaches_both_parts():
    kernel = replace(DEFAULT, heads=4, kernel=ROUTED, dropout=0.3).build().blocks[0].attention.kernel
    assert [part.active_dropout for part in kernel.parts] == [0.3, 0.3]
    kernel.dropout = 0.1
    assert [part.dropout for part in kernel.parts] == [0.1, 0.1]


def test_kernels_by_head_attend_to_a_context():
    """Two equal kernels are one kernel."""
    parts = HeadKernels(Softmax(), Softmax(), 1)
    spec = TransformerSpec(width=16, heads=2, layers=2, cross_attention=True, kernel=parts)
    split, whole = spec.build(), replace(spec, kernel=Softmax()).build()
    whole.load_state_dict(split.state_dict())
    index = TokenIndex.range(2, 5)
    x, context = torch.randn(2, 5, 16), Context(torch.randn(2, 5, 16), index)
    torch.testing.assert_close(split(x, index, None, context)[0], whole(x, index, None, context)[0])
