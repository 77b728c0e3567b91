"""Tests of the transformer stack in addition to the contracts."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from rlxf.agents.gtrxl.core import gtrxl
from rlxf.attention import ETC, LSH, AdaptiveSpan, Fixed, SinkSoftmax, TokenIndex, TransformerSpec, XLRelative
from rlxf.attention.feed_forward import FeedForward
from rlxf.attention.kernels.base import AttentionKernel
from rlxf.attention.linear import orthogonal_linear
from tests.attention.oracle import close
from tests.attention.passes import act, learn
from tests.attention.specs import ALONE, CAUSAL, DEFAULT, GTRXL, MEMORY, each, new_model, shared_model
from tests.attention.worlds import ANYWHERE, numbers, random_index, random_segment

RUN = random_segment(DEFAULT, TokenIndex.range(2, 6), torch.float32)


def output(model):
    return model(RUN.x, RUN.index)[0]


def test_pre_norm_does_not_normalize_the_stream():
    model = new_model(replace(DEFAULT, final_norm=False))
    with torch.no_grad():
        for block in model.blocks:
            for linear in (block.attention.out, block.feed_forward.outer):
                linear.weight.zero_()
                linear.bias.zero_()
    assert torch.equal(output(model), RUN.x)


def test_post_norm_normalizes_the_stream():
    model = replace(DEFAULT, norm="post", final_norm=False).build()
    y = output(model)
    close(y.mean(dim=-1), torch.zeros(2, 6), 1e-5)
    close(y.var(dim=-1, unbiased=False), torch.ones(2, 6), 1e-3)


def with_axis(*axes):
    return each({name: spec for name, spec in ALONE.items() if name.split()[0] in axes})


@with_axis("position", "kernel", "pattern")
def test_autocast_with_sink_logits(spec):
    check_autocast(replace(spec, kernel=SinkSoftmax()), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@with_axis("position", "kernel", "pattern", "residual", "recurrence")
def test_autocast(spec, dtype):
    check_autocast(spec, dtype)


def check_autocast(spec, dtype):
    """Products are computed in bfloat16 and sums in float32, which later operations mix.

    The input is in bfloat16 if it is the output of another layer.
    """
    model = new_model(spec)
    x = RUN.x.detach().to(dtype, copy=True).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, RUN.index)[0]
    y.float().square().sum().backward()
    assert x.grad.isfinite().all()
    if not isinstance(spec.kernel, LSH):  # rounding changes buckets
        expected = output(model)
        assert (y.float() - expected).norm() < 0.05 * expected.norm(), "bfloat16 has a precision of 0.4%"


def test_dropout_is_active_in_training_only():
    model = new_model(replace(DEFAULT, dropout=0.5))
    plain = new_model(DEFAULT)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(output(model.eval()), output(plain))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(output(model.train()), output(plain))


def test_attention_weights_are_dropped_in_training_only():
    index = TokenIndex.range(2, 6)
    model = new_model(replace(DEFAULT, dropout=0.5))
    attention = model.blocks[0].attention
    mask = model.attention_mask(index, index)
    model.eval()
    expected = attention.weights(RUN.x, None, mask)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.train()
        dropped = attention.weights(RUN.x, None, mask)
    visible = mask.allowed_by_head.expand_as(expected)
    ratios = (dropped / expected)[visible].round(decimals=4)
    assert set(ratios.unique().tolist()) == {0.0, 2.0}


def test_activations_equal_formulas():
    x = numbers(3, 4)
    for name, activation in (("relu", torch.relu), ("gelu", lambda h: h * 0.5 * (1 + (h / 2**0.5).erf()))):
        layer = FeedForward(4, 5, name).double()
        inner = F.linear(x, layer.inner.weight, layer.inner.bias)
        close(layer(x), F.linear(activation(inner), layer.outer.weight, layer.outer.bias))


def test_stacked_projections_are_initialized_orthogonally():
    for rows, columns in ((4, 4), (6, 4), (4, 6)):
        linear = orthogonal_linear(columns, rows, matrices=3)
        assert (linear.bias == 0).all()
        for matrix in linear.weight.split(rows):
            square = matrix @ matrix.T if rows <= columns else matrix.T @ matrix
            close(square, torch.eye(min(rows, columns)), 1e-5)


def test_seed_determines_weights():
    one, same, other = (new_model(GTRXL, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_fixed_depth_runs_every_layer_once_in_order():
    assert [Fixed().layer_of_pass(number) for number in range(3)] == [0, 1, 2]


@each(CAUSAL)
def test_acting_has_no_gradient(spec):
    model = new_model(spec)
    run = random_segment(spec, TokenIndex.range(2, 3), torch.float32)
    nothing = model.initial_state(2)
    y, hidden = act(model, run, model.cache(nothing, nothing.index.shape[1] + 3, run.context))
    assert not y.requires_grad
    assert not hidden.requires_grad


def test_cache_reuses_its_buffers():
    """The ring buffer is overwritten in place and keeps its size."""
    model = shared_model(GTRXL)
    run = random_segment(GTRXL, TokenIndex.range(2, 5 * MEMORY))
    cache = model.cache(model.initial_state(2), MEMORY + 1)
    first = [layer.keys.data_ptr() for layer in cache.layers]
    act(model, run, cache)
    assert [layer.keys.data_ptr() for layer in cache.layers] == first
    assert all(layer.keys.shape[2] == MEMORY + 1 for layer in cache.layers)


def test_relative_positions_are_shift_invariant():
    spec = replace(GTRXL, position=XLRelative())
    run = random_segment(spec, TokenIndex.range(2, 6))
    y, _ = shared_model(spec)(run.x, run.index)
    z, _ = shared_model(spec)(run.x, TokenIndex.range(2, 6, start=1000))
    close(z, y)


def test_the_penalty_excludes_a_removed_kernel():
    """Global tokens of ETC have no output, so the last layer has no attention from them."""
    sizes = {"width": 16, "layers": 2, "heads": 2, "feed_forward": 32}
    kernel = AdaptiveSpan(limit=8, ramp=2)
    model = TransformerSpec(**sizes, causal=False, pattern=ETC(4), kernel=kernel).build()
    penalties = [module.penalty() for module in model.modules() if isinstance(module, AttentionKernel)]
    close(model.penalty(), torch.stack(penalties).sum(), 1e-7)


@pytest.mark.slow
def test_torch_compile_follows_the_distances_of_each_segment():
    """The range of distances is a number that depends on the ends of episodes."""
    spec = replace(gtrxl(16, width=8, heads=2), layers=1)
    model = new_model(spec).eval()
    compiled = torch.compile(model, backend="eager")
    world = random_segment(spec, random_index(3, 18, moves=ANYWHERE), torch.float32)
    lengths = [6, 6, 6]
    torch.testing.assert_close(learn(compiled, world, lengths)[0], learn(model, world, lengths)[0])
