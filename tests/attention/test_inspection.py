"""What a transformer shows of itself is what it does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.attention import (
    KNN,
    RFA,
    Compressive,
    Full,
    GRUGate,
    Linformer,
    Routing,
    ShawRelative,
    TransformerSpec,
)
from rlxf.attention.index import EMPTY
from rlxf.attention.inspection import attention_weights, gate_openness
from rlxf.attention.patterns.base import GlobalTokens
from tests.attention.passes import agree, learn
from tests.attention.specs import CAUSAL, GTRXL, SPECS, built, each, fresh, remembering
from tests.attention.worlds import ANYWHERE, World, numbers, random_index, segmented, world

LENGTH = 7


def sums_up(spec: TransformerSpec, *methods: str) -> bool:
    """Whether tokens are seen through summaries that one of the methods makes."""
    return isinstance(spec.kernel, Linformer) and spec.kernel.method in methods


WEIGHED = {
    name: spec
    for name, spec in SPECS.items()
    if not isinstance(spec.position, ShawRelative)
    and not isinstance(spec.pattern, GlobalTokens)
    and not sums_up(spec, "convolution", "max")
    and not getattr(spec.kernel, "bias", False)
    and not isinstance(spec.memory, Compressive | KNN)
}
"""Whose attention is weights times values: not so where distances, global tokens or summaries come in."""


def segment(spec, dtype=torch.float64):
    """A segment, and what is remembered from before it where the spec remembers."""
    whole = world(spec, random_index(3, 2 * LENGTH, moves=ANYWHERE), dtype)
    before = None if spec.memory is None else learn(built(spec, dtype), whole, [LENGTH])[1]
    return whole.part(LENGTH, 2 * LENGTH), before


def looked_at(spec, run: World, state):
    return attention_weights(built(spec, run.x.dtype), run.x, run.index, state, run.context)


def allowed(spec, run: World, state, layer: int):
    """(B, H, T, M + T): pairs of one episode that the rules let meet, by a loop; keys with extra tokens."""
    index = built(spec).extra.index(run.index)
    key = index if state is None else state.index.concatenate(index)
    finds = isinstance(spec.memory, KNN) and layer == spec.memory.number(spec.layers)
    pattern = Full() if finds else spec.pattern
    query, rules = index.last(run.length), pattern.for_layer(layer).for_heads(spec.heads)
    meets = torch.zeros(query.shape[0], len(rules), run.length, key.shape[1], dtype=torch.bool)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, meets.shape)).tolist():
        here, there = int(query.position[b, i]), int(key.position[b, j])
        same = query.episode[b, i] == key.episode[b, j] != EMPTY
        ruled = bool(rules[h].allows(torch.tensor(here), torch.tensor(there)))
        own = here != there or getattr(spec.kernel, "include_self", True)
        meets[b, h, i, j] = bool(same) and ruled and own and (here >= there or not spec.causal)
    return meets.expand(-1, spec.heads, -1, -1)


@each(SPECS)
def test_weights_are_shares_of_what_may_be_seen(spec):
    run, state = segment(spec)
    for layer, weights in enumerate(looked_at(spec, run, state)):
        meets = allowed(spec, run, state, layer)
        whole = meets.any(-1).double()
        assert weights.shape == meets.shape
        assert (weights[~meets] == 0).all()
        if sums_up(spec, "learned"):
            continue
        assert (weights >= 0).all() or isinstance(spec.kernel, RFA)
        total = weights.sum(-1)
        if isinstance(spec.memory, KNN):  # what stands before the state is not shown
            assert (total < whole + 1e-9).all()
            continue
        if isinstance(spec.kernel, Routing):  # a cluster may hold nothing to see
            whole = whole * (total > 0)
        if getattr(spec.kernel, "softmax1", False):
            assert ((total < whole) | (whole == 0)).all()
        elif isinstance(spec.kernel, RFA):  # less than 1 where the denominator is within its noise
            assert ((total > 0) == (whole > 0)).all()
            assert (total < whole + 1e-9).all()
            assert (total > 1 - 1e-9).any()
        else:
            agree(total, whole)


@each(WEIGHED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_weights_times_values_are_the_layers_attention(spec, dtype):
    run, state = segment(spec, dtype)
    model, expected = built(spec, dtype), []
    hooks = [
        block.attention.register_forward_hook(lambda module, inputs, y: expected.append((module, inputs, y)))
        for block in model.blocks
    ]
    model.encode(run.x, run.index, state, run.context)
    for hook in hooks:
        hook.remove()
    for weights, (attention, (x, memory, _), y) in zip(looked_at(spec, run, state), expected, strict=True):
        values = attention.split(attention.qkv(x))[-1]
        mixed = weights @ (values if memory is None else torch.cat([memory[1], values], dim=2))
        sighted = weights.sum((1, 3)) > 0
        agree(attention.out(mixed.transpose(1, 2).flatten(2))[sighted], y[sighted])


@each(CAUSAL)
@given(drawn=segmented(), memory=st.integers(1, 6))
@settings(max_examples=5)
def test_looking_changes_nothing(spec, drawn, memory):
    index, lengths = drawn
    spec = remembering(spec, memory)
    run = world(spec, index)
    first = next(run.cut(lengths))
    y, state = built(spec)(first.x, first.index, None, first.context)
    looked_at(spec, first, None)
    gate_openness(built(spec), first.x, first.index, None, first.context)
    again, after = built(spec)(first.x, first.index, None, first.context)
    assert torch.equal(y, again)
    assert torch.equal(state.hidden, after.hidden)
    assert not any(module._forward_hooks for module in built(spec).modules())


def test_a_gates_openness_is_how_far_it_goes():
    """With h at 1, ``(1 - z) x + z h`` goes the share z of the way from x to 1."""
    gate = GRUGate().build(6, 2).double()
    with torch.no_grad():
        gate.w[12:], gate.u_g[:] = 0.0, 0.0
        gate.w[12:, 0] = 1e3  # h = tanh(1000 y_0), which is 1 as y_0 is above 0
    x, y = numbers(3, 4, 6), numbers(3, 4, 6, seed=1)
    y[..., 0] = 1.0
    agree((gate(x, y) - x) / (1 - x), gate.openness(x, y))


def test_every_gate_of_the_stack_is_seen():
    run, state = segment(GTRXL)
    model = fresh(GTRXL).double()
    with torch.no_grad():
        model.blocks[1].join_feed_forward.residual.b += 100.0
    openness = gate_openness(model, run.x, run.index, state)
    names = [
        f"blocks.{n}.join_{sublayer}.residual" for n in (0, 1) for sublayer in ("attention", "feed_forward")
    ]
    assert list(openness) == names
    shut = openness.pop(names[-1])
    assert shut.max() < 1e-20
    assert all(z.shape == run.x.shape and 0 < z.min() < z.max() < 1 for z in openness.values())


def test_without_gates_there_is_no_openness():
    spec = SPECS["Transformer-XL"]
    run, state = segment(spec)
    assert gate_openness(built(spec), run.x, run.index, state) == {}
