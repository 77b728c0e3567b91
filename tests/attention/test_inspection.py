"""Inspected attention weights and gates equal the ones that the model uses."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlxf.attention import (
    ACT,
    ETC,
    KNN,
    RATE,
    RFA,
    RMT,
    Compressive,
    Differential,
    Full,
    GRUGate,
    HeadKernels,
    HighwayGate,
    Linformer,
    Routing,
    ShawRelative,
    SinkSoftmax,
    State,
    StreamingXL,
    TokenIndex,
    TransformerSpec,
    Universal,
)
from rlxf.attention.inspection import attention_weights, gate_activations
from rlxf.attention.kernels.base import Kernel
from rlxf.attention.layers import Block
from rlxf.attention.patterns.global_tokens import GlobalTokens
from rlxf.attention.token_index import EMPTY
from tests.attention.passes import assert_close_for_dtype, learn
from tests.attention.specs import CAUSAL, DEFAULT, GTRXL, SPECS, each, new_model, shared_model, with_memory
from tests.attention.worlds import ANYWHERE, Segment, numbers, random_index, random_segment, segmented_index

LENGTH = 7


def head_groups(spec: TransformerSpec, layer: int) -> list[tuple[Kernel, slice]]:
    """Return the kernels of a layer and their heads."""
    kernel = spec.kernel.for_layers(spec.layers)[layer]
    if isinstance(kernel, HeadKernels):
        return [(kernel.first, slice(0, -kernel.heads)), (kernel.second, slice(-kernel.heads, None))]
    return [(kernel, slice(None))]


def uses_summaries(spec: TransformerSpec, *methods: str) -> bool:
    """Return whether the kernel is Linformer with one of the given methods."""
    return isinstance(spec.kernel, Linformer) and spec.kernel.method in methods


LINEAR_IN_VALUES = {
    name: spec
    for name, spec in SPECS.items()
    if not isinstance(spec.position, ShawRelative)
    and not isinstance(spec.pattern, GlobalTokens)
    and not uses_summaries(spec, "convolution", "max")
    and not getattr(spec.kernel, "bias", False)
    and not isinstance(spec.memory, Compressive | KNN | StreamingXL | RMT)
    and not isinstance(spec.kernel, Differential)
}
"""Specs whose attention output is weights times values, without terms of distances, summaries or norms."""


def segment(spec, dtype=torch.float64):
    """Return a segment and the memory state before it; None without memory."""
    whole = random_segment(spec, random_index(3, 2 * LENGTH, moves=ANYWHERE), dtype)
    before = None if spec.memory is None else learn(shared_model(spec, dtype), whole, [LENGTH])[1]
    return whole.part(LENGTH, 2 * LENGTH), before


def inspect_weights(spec, run: Segment, state):
    return attention_weights(shared_model(spec, run.x.dtype), run.x, run.index, state, run.context)


def allowed(spec, run: Segment, state, layer: int):
    """Compute the attention mask (B, H, T, M + T) by a loop; keys include the global tokens."""
    index = shared_model(spec).global_token_embedding.index(run.index)
    key = index if state is None else state.index.concatenate(index)
    retrieves = isinstance(spec.memory, KNN) and layer == spec.memory.older_layer(spec.layers)
    visible = shared_model(spec).memory.visible_pattern(spec.pattern)
    pattern = Full() if retrieves else visible if isinstance(spec.memory, StreamingXL) else spec.pattern
    query, rules = index.last(run.length), pattern.for_layer(layer).for_heads(spec.score_heads)
    meets = torch.zeros(query.shape[0], len(rules), run.length, key.shape[1], dtype=torch.bool)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, meets.shape)).tolist():
        here, there = int(query.position[b, i]), int(key.position[b, j])
        same = query.episode[b, i] == key.episode[b, j] != EMPTY
        ruled = bool(rules[h].mask_mod(torch.tensor(here), torch.tensor(there)))
        own = here != there or getattr(spec.kernel, "include_self", True)
        meets[b, h, i, j] = bool(same) and ruled and own and (here >= there or not spec.causal)
    return meets.expand(-1, spec.score_heads, -1, -1).unflatten(1, (spec.heads, -1)).any(2)


@each(SPECS)
def test_weights_are_distributions_over_visible_keys(spec):
    run, state = segment(spec)
    layers = [layer for layer in range(spec.layers) if not spec.is_recurrent(layer)]
    for layer, weights in zip(layers, inspect_weights(spec, run, state), strict=True):
        meets = allowed(spec, run, state, layer)
        assert weights.shape == meets.shape
        assert (weights[~meets] == 0).all()
        for kernel, heads in head_groups(spec, layer):
            assert_distributions(spec, layer, kernel, weights[:, heads], meets[:, heads].any(-1).double())


def assert_distributions(spec, layer: int, kernel: Kernel, weights, whole):
    """Assert that weights (B, H, T, M + T) are positive and sum to 1 where ``whole`` (B, H, T) is 1."""
    if isinstance(kernel, Linformer) and kernel.method == "learned":
        return
    total = weights.sum(-1)
    assert (weights >= 0).all() or isinstance(kernel, RFA | Differential)
    if isinstance(kernel, Differential):  # each token attends to itself in both maps
        whole = whole * (1 - shared_model(spec).blocks[layer].attention.lambda_.detach())
    if isinstance(spec.memory, KNN | StreamingXL | RMT):  # weights of tokens before the state are left out
        assert (total < whole + 1e-9).all()
        return
    if isinstance(kernel, Routing):  # a cluster may have no visible keys
        whole = whole * (total > 0)
    if getattr(kernel, "softmax1", isinstance(kernel, SinkSoftmax)):
        assert ((total < whole) | (whole == 0)).all()
    elif isinstance(kernel, RFA):  # less than 1 where the denominator is within its noise
        assert ((total > 0) == (whole > 0)).all()
        assert (total < whole + 1e-9).all()
        assert (total > 1 - 1e-9).any()
    else:
        assert_close_for_dtype(total, whole)


@each(LINEAR_IN_VALUES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_weights_times_values_equal_layer_output(spec, dtype):
    run, state = segment(spec, dtype)
    model, expected = shared_model(spec, dtype), []
    hooks = [
        block.attention.register_forward_hook(lambda module, inputs, y: expected.append((module, inputs, y)))
        for block in model.blocks
        if isinstance(block, Block)
    ]
    model.encode(run.x, run.index, state, run.context)
    for hook in hooks:
        hook.remove()
    for weights, (attention, (x, memory, _), y) in zip(
        inspect_weights(spec, run, state), expected, strict=True
    ):
        values = attention.split(attention.qkv(x), attention.width)[-1]
        values = values if memory is None else torch.cat([memory[1], values], dim=2)
        mixed = weights @ attention.repeat_keys(values, values)[1]
        mixed = mixed if attention.output_gate is None else attention.output_gate(x, mixed)
        sighted = weights.sum((1, 3)) > 0
        assert_close_for_dtype(attention.out(mixed.transpose(1, 2).flatten(2))[sighted], y[sighted])


@each(CAUSAL)
@given(drawn=segmented_index(), memory=st.integers(1, 6))
@settings(max_examples=5)
def test_inspection_has_no_side_effects(spec, drawn, memory):
    index, lengths = drawn
    spec = with_memory(spec, memory)
    run = random_segment(spec, index)
    first = next(run.cut(lengths))
    y, state = shared_model(spec)(first.x, first.index, None, first.context)
    inspect_weights(spec, first, None)
    gate_activations(shared_model(spec), first.x, first.index, None, first.context)
    again, after = shared_model(spec)(first.x, first.index, None, first.context)
    assert torch.equal(y, again)
    assert torch.equal(state.hidden, after.hidden)
    assert not any(module._forward_hooks for module in shared_model(spec).modules())


def test_gate_activations_is_the_interpolation_weight():
    """With h = 1, the gate ``(1 - z) x + z h`` moves x towards 1 by the fraction z."""
    gate = GRUGate().build(6, 2).double()
    with torch.no_grad():
        gate.w[12:], gate.u_g[:] = 0.0, 0.0
        gate.w[12:, 0] = 1e3  # h = tanh(1000 y_0), which is 1 as y_0 is above 0
    x, y = numbers(3, 4, 6), numbers(3, 4, 6, seed=1)
    y[..., 0] = 1.0
    assert_close_for_dtype((gate(x, y) - x) / (1 - x), gate.update_gate(x, y))


def test_update_gate_of_a_highway_is_the_interpolation_weight():
    gate = HighwayGate().build(6, 2).double()
    x, y = numbers(3, 4, 6), numbers(3, 4, 6, seed=1)
    assert_close_for_dtype(gate(x, y), torch.lerp(x, y.relu(), gate.update_gate(x, y)))


GATED = {
    "memory tokens": replace(DEFAULT, memory=RMT(3, 2), residual=GRUGate(1.0)),
    "memory tokens, shared layer": replace(DEFAULT, memory=RATE(4, 1), residual=GRUGate(), depth=Universal()),
    "global tokens": replace(DEFAULT, pattern=ETC(1, 2, 4), causal=False, residual=HighwayGate(0.0)),
    "shared layer": replace(DEFAULT, depth=Universal(), layers=3, residual=GRUGate(0.0)),
    "compressed memory": replace(DEFAULT, memory=Compressive(2, 2, 2), residual=GRUGate(0.0)),
}


@pytest.mark.parametrize("core", GATED.values(), ids=GATED)
def test_gate_activations_are_those_of_the_tokens_in_each_pass(core):
    """Zero weights of the sublayers make the stream its input times known fractions.

    With outputs of the sublayers that are 0 after the ReLU, ``HighwayGate`` and a `GRUGate` with U_g = 0 give
    ``(1 - z) x`` after each gate, so the activations multiply up to the output.
    """
    model = new_model(replace(core, final_norm=False)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("out.weight", "outer.weight", "u_g")):
                parameter.zero_()
            elif name.endswith(("out.bias", "outer.bias")):
                parameter.fill_(-1.0)
    run, state = segment_of(model)
    y, activations = model(run.x, run.index, state)[0], gate_activations(model, run.x, run.index, state)
    assert list(activations) == [
        f"blocks.{n}.{sublayer}_norm.residual"
        for n in range(core.layers)
        for sublayer in ("attention", "feed_forward")
    ]
    assert all(z.shape == run.x.shape for z in activations.values())
    kept = torch.stack([1 - z for z in activations.values()]).prod(0)
    assert_close_for_dtype(y[run.filled], (run.x * kept)[run.filled])


def segment_of(model) -> tuple[Segment, State | None]:
    """Return a segment and the memory state before it; None without memory."""
    whole = random_segment(model.spec, random_index(3, 2 * LENGTH))
    state = None if model.spec.memory is None else learn(model, whole, [LENGTH])[1]
    return whole.part(LENGTH, 2 * LENGTH), state


def test_gate_activations_of_a_pass_that_no_token_takes_are_zero():
    model = new_model(replace(DEFAULT, depth=ACT(bias=50.0), layers=3, residual=GRUGate())).double()
    x, index = numbers(2, 5, 8), TokenIndex.range(2, 5)
    activations = gate_activations(model, x, index)
    assert len(activations) == 6
    taken = [bool(z.any()) for z in activations.values()]
    assert taken == [True, True, False, False, False, False]
    assert all(z.shape == x.shape for z in activations.values())


def test_gate_activations_covers_every_gate():
    run, state = segment(GTRXL)
    model = new_model(GTRXL).double()
    with torch.no_grad():
        model.blocks[1].feed_forward_norm.residual.b += 100.0
    activations = gate_activations(model, run.x, run.index, state)
    names = [
        f"blocks.{n}.{sublayer}_norm.residual" for n in (0, 1) for sublayer in ("attention", "feed_forward")
    ]
    assert list(activations) == names
    shut = activations.pop(names[-1])
    assert shut.max() < 1e-20
    assert all(z.shape == run.x.shape and 0 < z.min() < z.max() < 1 for z in activations.values())


def test_gate_activations_is_empty_without_gates():
    spec = SPECS["Transformer-XL"]
    run, state = segment(spec)
    assert gate_activations(shared_model(spec), run.x, run.index, state) == {}
