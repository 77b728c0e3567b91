"""Bucketed attention on sorted tokens equals dense attention, with memory below quadratic."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlxf.attention import (
    ETC,
    LSH,
    XL,
    Longformer,
    RoPE,
    Routing,
    State,
    TokenIndex,
    Transformer,
    TransformerSpec,
    Window,
)
from rlxf.attention.kernels import bucket_attention
from rlxf.attention.token_index import EMPTY
from tests.attention.largest_tensor import LargestTensor
from tests.attention.passes import assert_close_for_dtype
from tests.attention.specs import each, new_model
from tests.attention.worlds import numbers

SMALL = TransformerSpec(width=8, heads=2, layers=1, feed_forward=12)
KERNELS = (LSH(3, 6), LSH(1, 40), Routing(3), Routing(40))
SPECS = {repr(kernel): replace(SMALL, kernel=kernel) for kernel in KERNELS} | {
    "encoder, LSH": replace(SMALL, kernel=LSH(3, 6), causal=False),
    "encoder, Routing": replace(SMALL, kernel=Routing(3), causal=False),
    "turned": replace(SMALL, kernel=LSH(2, 4), position=RoPE()),
}
LENGTH = 90


@pytest.mark.parametrize(
    ("kernel", "dtype", "exact"),
    [
        (LSH(1, 512), torch.bfloat16, True),
        (LSH(1, 514), torch.bfloat16, False),
        (LSH(1, 4098), torch.float16, False),
        (Routing(257), torch.bfloat16, True),
        (Routing(258), torch.bfloat16, False),
        (Routing(258), torch.float16, True),
    ],
    ids=repr,
)
def test_bucket_numbers_are_exact(kernel, dtype, exact):
    """A narrow dtype rounds large numbers, which would merge buckets."""
    module, x = kernel.build(8, 1), numbers(1, 1, 4000, 8).float()
    if not exact:
        with pytest.raises(ValueError, match=f"{re.escape(repr(kernel))} stores .* dtype {dtype} .* only"):
            module.projected_query_extras(x.to(dtype))
        return
    x = x.to(dtype)
    stored, wide = module.projected_query_extras(x), module.projected_query_extras(x.float())
    assert torch.equal(stored.float(), wide)


def episodes() -> TokenIndex:
    """Return one row of two episodes with empty slots around them, and one row that starts at position 7."""
    episode = [EMPTY] * 5 + [0] * 40 + [EMPTY] * 3 + [1] * (LENGTH - 48)
    position = [0] * 5 + [*range(40)] + [0] * 3 + [*range(LENGTH - 48)]
    return TokenIndex(torch.tensor([position, range(7, 7 + LENGTH)]), torch.tensor([episode, [0] * LENGTH]))


def outcome(
    model: Transformer, output_slice: slice | None = None, state: State | None = None
) -> list[Tensor]:
    """Return the outputs of non-empty slots and all gradients."""
    index = episodes()
    x = numbers(*index.shape, model.spec.width).requires_grad_()
    y, _ = model.encode(x, index, state, output_slice=output_slice)
    filled = y[(index.episode != EMPTY)[:, output_slice or slice(None)]]
    leaves = [x, *model.parameters()]
    loss = (filled * numbers(*filled.shape, seed=1)).sum()
    return [filled.detach(), *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]


def compare_sorted_with_dense(monkeypatch: pytest.MonkeyPatch, run: Callable[[], list[Tensor]]) -> None:
    results = []
    for least in (2**40, 0):
        monkeypatch.setattr(bucket_attention, "MIN_PAIRS_TO_SORT", least)
        results.append(run())
    for dense, fast in zip(*results, strict=True):
        assert_close_for_dtype(fast, dense)


@each(SPECS)
@pytest.mark.parametrize("slab", [2**8, 2**18], ids=["in slabs", "at once"])
def test_sorted_buckets_equal_dense_attention(spec, slab, monkeypatch):
    monkeypatch.setattr(bucket_attention, "PAIRS_PER_STEP", slab)
    model = new_model(spec).double()
    compare_sorted_with_dense(monkeypatch, lambda: outcome(model))


@each(SPECS)
def test_subset_of_queries(spec, monkeypatch):
    model = new_model(spec).double()
    compare_sorted_with_dense(monkeypatch, lambda: outcome(model, output_slice=slice(1, None, 3)))


@each({name: replace(spec, memory=XL(7)) for name, spec in SPECS.items() if spec.causal})
def test_memory(spec, monkeypatch):
    model = new_model(spec).double()
    where = TokenIndex(torch.tensor([[0] * 7, range(7)]), torch.tensor([[EMPTY] * 7, [0] * 7]))
    state = State(1e2 * numbers(1, 2, 7, spec.width, seed=2), where)
    compare_sorted_with_dense(monkeypatch, lambda: outcome(model, state=state))


@each(SPECS)
def test_large_scores(spec, monkeypatch):
    """Scores in the hundreds, whose exponentials overflow, do not cause errors."""
    model = new_model(spec).double()
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight *= 20
    compare_sorted_with_dense(monkeypatch, lambda: outcome(model))
    assert all(part.isfinite().all() for part in outcome(model))


@each({name: spec for name, spec in SPECS.items() if spec.causal})
def test_sorted_buckets_are_causal(spec, monkeypatch):
    monkeypatch.setattr(bucket_attention, "MIN_PAIRS_TO_SORT", 0)
    model, x = new_model(spec).double(), numbers(40, 60, spec.width)
    changed_step = torch.arange(40) + 10
    changed = x.clone()
    changed[torch.arange(40), changed_step] += numbers(40, spec.width, seed=3)
    y, z = (model(some, TokenIndex.range(40, 60))[0] for some in (x, changed))
    for n, t in enumerate(changed_step.tolist()):
        assert_close_for_dtype(z[n, :t], y[n, :t])
        assert (z[n, t:] - y[n, t:]).abs().max() > 1e-6


@each(SPECS)
def test_other_episodes_and_empty_slots_have_no_effect(spec, monkeypatch):
    monkeypatch.setattr(bucket_attention, "MIN_PAIRS_TO_SORT", 0)
    model, index = new_model(spec).double(), episodes()
    x = numbers(*index.shape, spec.width)
    other = torch.where((index.episode == 1)[..., None], x, 1e4 * numbers(*x.shape, seed=4))
    y, z = (model(some, index)[0] for some in (x, other))
    assert_close_for_dtype(z[index.episode == 1], y[index.episode == 1])


LONG = 2048


@each(
    {
        f"{way}{name}": replace(SMALL, heads=1, kernel=kernel, causal=not way)
        for name, kernel in (("LSH", LSH(2, 128)), ("Routing", Routing(64)))
        for way in ("", "encoder, ")
    }
    | {"encoder, even clusters": replace(SMALL, heads=1, kernel=Routing(64, window=32), causal=False)}
)
def test_memory_is_below_quadratic(spec):
    model, x = new_model(spec), numbers(1, LONG, spec.width, dtype=torch.float32)
    with LargestTensor() as largest:
        y, _ = model(x, TokenIndex.range(1, LONG))
        y.sum().backward()
    assert LONG * spec.width <= largest.size < LONG**2 / 8


def test_balanced_clusters_require_all_queries():
    model = new_model(replace(SMALL, kernel=Routing(2, window=3), causal=False))
    with pytest.raises(ValueError, match=r"Routing\(clusters=2, window=3.*got a selection of queries"):
        model.encode(
            numbers(1, 6, 8, dtype=torch.float32), TokenIndex.range(1, 6), output_slice=slice(2, None)
        )


def test_seed_determines_rotations_and_centroids():
    one, same, other = (LSH(seed=seed).build(8, 2).rotations for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])
    one, other = (Routing(seed=seed).build(8, 2).centroids for seed in (0, 1))
    assert not torch.equal(one, other)
    assert {"centroids"} == set(Routing().build(8, 2).state_dict())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"kernel": LSH(), "cross_attention": True}, "from different sequences; choose another"),
        ({"kernel": LSH(), "pattern": Longformer()}, "has separate ones for global tokens; choose"),
        ({"kernel": LSH(), "pattern": ETC(), "causal": False}, "has separate ones for global tokens; choose"),
        ({"kernel": LSH(chunk=4)}, "set chunk=None"),
        ({"kernel": Routing(window=4)}, "set window=None"),
        (
            {"kernel": LSH(chunk=4), "causal": False, "pattern": Window(3)},
            "Window(size=3) hides a part of it",
        ),
        ({"kernel": Routing(window=4), "causal": False, "pattern": Window(3)}, "hides a part of it"),
    ],
)
def test_incompatible_settings_raise(choices, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        TransformerSpec(**choices)
    assert repr(choices["kernel"]) in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LSH(rounds=0), "LSH rounds must be at least 1, got 0"),
        (lambda: LSH(buckets=0), "LSH buckets must be at least 2, got 0"),
        (lambda: LSH(buckets=5), "LSH buckets must be even, got 5"),
        (lambda: LSH(chunk=0), "LSH chunk must be at least 1, got 0"),
        (lambda: LSH(seed=-1), "LSH seed must be at least 0, got -1"),
        (lambda: Routing(clusters=0), "Routing clusters must be at least 1, got 0"),
        (lambda: Routing(window=0), "Routing window must be at least 1, got 0"),
        (lambda: Routing(decay=1.0), "Routing decay must be from 0 to below 1, got 1.0"),
        (lambda: Routing(commitment=-1.0), "Routing commitment must not be negative, got -1.0"),
        (lambda: Routing(seed=-1), "Routing seed must be at least 0, got -1"),
    ],
)
def test_options_are_in_range(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
