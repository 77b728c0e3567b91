"""Contracts that every technique fulfils (specs.py lists the tested specs).

1. Acting equals learning. 2. Causality. 3. Isolation of episodes. 4. Memory states are immutable values.
5. Segments with full memory equal one long segment. 6. Gradients, serialization and number formats.
"""

import pickle
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlxf.attention import (
    KNN,
    LSH,
    XL,
    Context,
    DeltaNet,
    ExitTargets,
    RetNet,
    Routing,
    State,
    TokenIndex,
    Transformer,
    TransformerSpec,
)
from rlxf.attention.recurrent.base import RecurrentState
from rlxf.attention.registry import OPTIONAL, TECHNIQUES
from rlxf.attention.technique import PendingTerms
from rlxf.attention.token_index import EMPTY
from tests.attention.passes import act, assert_close_for_dtype, learn
from tests.attention.specs import CAUSAL, SPECS, each, new_model, shared_model, streaming, with_memory
from tests.attention.worlds import ANYWHERE, Segment, numbers, random_index, random_segment, segmented_index

DTYPES = st.sampled_from([torch.float64, torch.float32])


def test_every_technique_is_covered():
    for axis, techniques in TECHNIQUES.items():
        tested = {type(getattr(spec, axis)) for spec in SPECS.values()}
        assert set(techniques.values()) <= tested
        assert (type(None) in tested) == (axis in OPTIONAL)


# 1. Acting equals learning.


@each(CAUSAL)
@given(drawn=segmented_index(), memory=st.integers(1, 6), spare=st.integers(0, 3), dtype=DTYPES)
@settings(max_examples=8)
def test_acting_with_ring_buffer_equals_learning_in_segments(spec, drawn, memory, spare, dtype):
    index, lengths = drawn
    model = shared_model(streaming(spec, memory), dtype)
    run = random_segment(spec, index, dtype)
    learned, state = learn(model, run, lengths)
    capacity = model.memory.length + 1 + spare
    cache = model.cache(model.initial_state(index.shape[0]), capacity, run.context)
    acted, hidden = act(model, run, cache)
    assert_close_for_dtype(acted[run.filled], learned[run.filled])
    state_and_segment = model.memory(model.initial_state(index.shape[0]), hidden, index)
    assert_same_state(replace(state_and_segment, recurrent=cache.recurrent), state)


def assert_same_state(actual: State, expected: State) -> None:
    assert torch.equal(actual.index.episode, expected.index.episode)
    assert torch.equal(actual.index.position, expected.index.position)
    filled = expected.index.episode != EMPTY
    assert_close_for_dtype(actual.hidden[:, filled], expected.hidden[:, filled])
    assert (actual.older is None) == (expected.older is None)
    if actual.older is not None and expected.older is not None:
        assert_same_state(actual.older, expected.older)
    assert (actual.recurrent is None) == (expected.recurrent is None)
    if actual.recurrent is not None and expected.recurrent is not None:
        assert_same_recurrent_state(actual.recurrent, expected.recurrent, expected.hidden.dtype)


def assert_same_recurrent_state(actual: RecurrentState, expected: RecurrentState, dtype: torch.dtype) -> None:
    """Compare states to the precision of the model's dtype, which may be lower than that of a state."""
    assert torch.equal(actual.episode, expected.episode)
    for one, other in zip(actual.passes, expected.passes, strict=True):
        assert one.keys() == other.keys()
        for name, x in one.items():
            assert_close_for_dtype(x.to(dtype), other[name].to(dtype))


@each(CAUSAL)
@given(drawn=segmented_index(moves=ANYWHERE), memory=st.integers(1, 6), dtype=DTYPES)
@settings(max_examples=5)
def test_acting_from_the_state_before_a_segment_equals_learning(spec, drawn, memory, dtype):
    index, lengths = drawn
    model, state = shared_model(with_memory(spec, memory), dtype), None
    for segment in random_segment(spec, index, dtype).cut(lengths):
        start = state or model.initial_state(index.shape[0])
        cache = model.cache(start, start.index.shape[1] + segment.length, segment.context)
        acted, hidden = act(model, segment, cache)
        learned, state = model(segment.x, segment.index, state, segment.context)
        assert_close_for_dtype(acted[segment.filled], learned[segment.filled])
        read = model.encode(segment.x, segment.index, start, segment.context)[1]
        assert_close_for_dtype(hidden[:, segment.filled], torch.stack(read)[:, segment.filled])


# 2. Causality.


@each(CAUSAL)
def test_changed_token_does_not_affect_earlier_outputs(spec):
    trials, length = 40, 10
    before, run = state_and_segment(spec, trials, length)
    model, moment = shared_model(spec), torch.arange(trials) % length
    changed = run.x.clone()
    changed[torch.arange(trials), moment] += numbers(trials, spec.width, seed=3)
    y, _ = model(run.x, run.index, before, run.context)
    z, _ = model(changed, run.index, before, run.context)
    earlier = torch.arange(length) < moment[:, None]
    kept = [torch.equal(y[n, earlier[n]], z[n, earlier[n]]) for n in range(trials)]
    assert sum(kept) == trials
    now = run.filled & (torch.arange(length) == moment[:, None])
    assert (y - z)[now].abs().amax(dim=-1).min() > 1e-6


@each(CAUSAL)
def test_outputs_do_not_depend_on_later_tokens(spec):
    before, run = state_and_segment(spec, batch=3, length=9)
    whole, _ = shared_model(spec)(run.x, run.index, before, run.context)
    for end in range(1, run.length):
        some = run.part(0, end)
        y, _ = shared_model(spec)(some.x, some.index, before, some.context)
        assert_close_for_dtype(y[some.filled], whole[:, :end][some.filled])


def state_and_segment(spec: TransformerSpec, batch: int, length: int) -> tuple[State | None, Segment]:
    """Return a non-empty state (None without memory) and the segment that follows it."""
    whole = random_segment(spec, random_index(batch, 2 * length))
    if spec.memory is None and spec.recurrence is None:
        return None, whole.part(length, 2 * length)
    return learn(shared_model(spec), whole, [length])[1], whole.part(length, 2 * length)


@each(SPECS)
@pytest.mark.parametrize("output_slice", [slice(1, None, 3), slice(-1, None), slice(0, 4)], ids=str)
def test_outputs_of_selected_tokens_equal_full_pass(spec, output_slice):
    whole = random_segment(spec, random_index(3, 16))
    state = learn(shared_model(spec), whole, [8])[1]
    run = whole.part(8, 16)
    x = run.x.requires_grad_()
    results = []
    for selection in (None, output_slice):
        y, hidden = shared_model(spec).encode(x, run.index, state, run.context, selection)
        y = y if selection else y[:, output_slice]
        seen = torch.where(run.filled[:, output_slice, None], y, 0.0)
        weights = [x, *shared_model(spec).parameters()]
        gradients = torch.autograd.grad((seen * numbers(*y.shape, seed=8)).sum(), weights, allow_unused=True)
        results.append((seen, *hidden, *(torch.zeros(()) if g is None else g for g in gradients)))
    for part, expected in zip(*reversed(results), strict=True):
        assert_close_for_dtype(part, expected.expand_as(part))


# 3. Isolation of episodes.


def even(index: TokenIndex) -> Tensor:
    """Return a mask (B, T) of even episodes and empty slots, which must not affect odd episodes."""
    return (index.episode % 2 == 0) | (index.episode == EMPTY)


@each(SPECS)
@given(drawn=segmented_index(moves=ANYWHERE))
@settings(max_examples=5)
def test_other_episodes_and_empty_slots_have_no_effect(spec, drawn):
    index, lengths = drawn
    run, masked = random_segment(spec, index), even(index)
    noise = 1e4 * numbers(*run.x.shape, seed=4)
    other = run.with_tokens(torch.where(masked[..., None], noise, run.x))
    y, _ = learn(shared_model(spec), run, lengths)
    z, _ = learn(shared_model(spec), other, lengths)
    assert torch.equal(y[~masked], z[~masked])


@each(SPECS)
@given(drawn=segmented_index(moves=ANYWHERE))
@settings(max_examples=5)
def test_gradients_do_not_cross_episode_boundaries(spec, drawn):
    index, _ = drawn
    run, masked = random_segment(spec, index), even(index)
    x = run.x.requires_grad_()
    y, _ = shared_model(spec)(x, index, context=run.context)
    (gradient,) = torch.autograd.grad((y * numbers(*y.shape, seed=5))[~masked].sum(), x)
    assert (gradient[masked] == 0).all()
    assert (gradient[~masked].abs().amax(dim=-1) > 0).all()


def half_full(spec: TransformerSpec, batch: int, filling: float) -> State:
    """Return a state whose older half of slots is empty and contains ``filling`` times noise."""
    length = spec.memory.length
    index = TokenIndex.range(batch, length)
    empty = index.position < (length + 1) // 2
    hidden = numbers(spec.layers, batch, length, spec.width, seed=6)
    hidden = torch.where(empty[..., None], filling * hidden, hidden)
    older = None
    if isinstance(spec.memory, KNN):
        noise = filling * numbers(1, batch, spec.memory.far, spec.width, seed=10)
        older = State(noise, TokenIndex.empty(batch, spec.memory.far))
    own = TokenIndex(index.position, index.episode.masked_fill(empty, EMPTY))
    return State(hidden, own, older, shared_model(spec).initial_recurrent_state(batch))


WITH_MEMORY = {name: spec for name, spec in SPECS.items() if spec.memory}
STATEFUL = {name: spec for name, spec in SPECS.items() if spec.memory or spec.recurrence}


@each(WITH_MEMORY)
def test_contents_of_empty_memory_slots_have_no_effect(spec):
    model = new_model(spec).double()
    run = random_segment(spec, TokenIndex.range(2, 5, start=spec.memory.length))
    outcome = []
    for filling in (0.0, 1e4):
        state = half_full(spec, 2, filling)
        y, _ = model(run.x, run.index, state, run.context)
        gradients = torch.autograd.grad(
            (y * numbers(*y.shape)).sum(), model.parameters(), allow_unused=True, materialize_grads=True
        )
        cache = model.cache(state, state.index.shape[1] + run.length, run.context)
        outcome.append((y, act(model, run, cache)[0], *gradients))
    assert all(torch.equal(a, b) for a, b in zip(*outcome, strict=True))


@each({name: spec for name, spec in SPECS.items() if spec.cross_attention})
def test_contents_of_empty_context_slots_have_no_effect(spec):
    run = random_segment(spec, random_index(2, 8))
    empty = (run.context.index.episode == EMPTY)[..., None]
    assert empty.any()
    noisy = Context(torch.where(empty, 1e4 * run.context.x, run.context.x), run.context.index)
    y, _ = shared_model(spec)(run.x, run.index, context=run.context)
    z, _ = shared_model(spec)(run.x, run.index, context=noisy)
    assert torch.equal(y, z)


@each(SPECS)
def test_batch_rows_are_independent(spec):
    run = random_segment(spec, random_index(4, 9, moves=ANYWHERE))
    together = output(shared_model(spec), run)
    for number in range(4):
        chosen = torch.tensor([number])
        context = run.context and Context(run.context.x[chosen], run.context.index.rows(chosen))
        alone = Segment(run.x[chosen], run.index.rows(chosen), context)
        assert_close_for_dtype(
            output(shared_model(spec), alone)[alone.filled], together[chosen][alone.filled]
        )


@each(CAUSAL)
def test_missing_state_equals_empty_state(spec):
    run = random_segment(spec, random_index(2, 8))
    model = shared_model(spec)
    y, _ = model(run.x, run.index, None, run.context)
    z, _ = model(run.x, run.index, model.initial_state(2), run.context)
    assert_close_for_dtype(z[run.filled], y[run.filled])


# 4. Memory states are immutable values.


@each(WITH_MEMORY)
def test_input_state_is_not_modified(spec):
    model, run = shared_model(spec), random_segment(spec, TokenIndex.range(2, 3, start=spec.memory.length))
    state = half_full(spec, 2, 1.0)
    kept = (state.hidden.clone(), state.index.position.clone(), state.index.episode.clone())
    first, after = model(run.x, run.index, state, run.context)
    act(model, run, model.cache(state, spec.memory.length, run.context))
    second, again = model(run.x, run.index, state, run.context)
    assert all(
        torch.equal(a, b)
        for a, b in zip(kept, (state.hidden, state.index.position, state.index.episode), strict=True)
    )
    assert torch.equal(first, second)
    assert torch.equal(after.hidden, again.hidden)
    assert after.hidden.untyped_storage().data_ptr() != state.hidden.untyped_storage().data_ptr()


@each(STATEFUL)
def test_next_state_returns_the_state_of_forward(spec):
    state, run = state_and_segment(spec, 2, 6)
    _, expected = shared_model(spec)(run.x, run.index, state, run.context)
    assert_same_state(shared_model(spec).next_state(run.x, run.index, state, run.context), expected)


@each(WITH_MEMORY)
def test_no_gradient_flows_into_memory(spec):
    model, run = shared_model(spec), random_segment(spec, TokenIndex.range(2, 6))
    x = run.x.requires_grad_()
    _, state = model(x[:, :3], run.part(0, 3).index, context=run.context)
    assert not state.hidden.requires_grad
    y, _ = model(x[:, 3:], run.part(3, 6).index, state, run.context)
    (gradient,) = torch.autograd.grad((y * numbers(*y.shape)).sum(), x)
    assert (gradient[:, :3] == 0).all()
    assert (gradient[:, 3:] != 0).all()


@each({name: spec for name, spec in SPECS.items() if spec.recurrence})
def test_recurrent_states_are_values_without_gradient(spec):
    model, run = shared_model(spec), random_segment(spec, TokenIndex.range(2, 8))
    x = run.x.requires_grad_()
    _, state = model(x[:, :4], run.part(0, 4).index)
    kept = state.recurrent.map(Tensor.clone)
    first, after = model(x[:, 4:], run.part(4, 8).index, state)
    (gradient,) = torch.autograd.grad((first * numbers(*first.shape)).sum(), x)
    assert (gradient[:, :4] == 0).all()
    second, again = model(x[:, 4:], run.part(4, 8).index, state)
    assert torch.equal(first, second)
    for one, other in ((state, replace(state, recurrent=kept)), (after, again)):
        assert_same_recurrent_state(one.recurrent, other.recurrent, x.dtype)
    fresh, _ = model(x[:, 4:], run.part(4, 8).index)
    assert ((first - fresh).abs().amax(dim=-1) > 1e-9).float().mean() > 0.8  # AGaLiTe forgets some features


@each(WITH_MEMORY)
def test_state_has_one_hidden_vector_per_layer_and_token(spec):
    run = random_segment(spec, TokenIndex.range(3, 2 * spec.memory.length))
    _, state = shared_model(spec)(run.x, run.index, context=run.context)
    assert state.hidden.shape == (spec.layers, 3, spec.memory.length, spec.width)
    assert state.index.shape == (3, spec.memory.length)


@each(CAUSAL)
def test_rows_of_a_cache_are_copies(spec):
    """The ring buffer is small, so a shared buffer would be overwritten by another owner."""
    model, run = shared_model(spec), random_segment(spec, TokenIndex.range(3, 9))
    start, rest, rows = run.part(0, 4), run.part(4, 9), torch.tensor([2, 0])
    nothing = model.initial_state(3)
    capacity = max(5, nothing.index.shape[1])
    expected = act(model, run, model.cache(nothing, capacity, run.context))[0][:, 4:]
    cache = model.cache(nothing, capacity, run.context)
    act(model, start, cache)
    spare, some = cache.copy(), cache.rows(rows)
    act(model, rest.with_tokens(-rest.x), cache)
    assert torch.equal(act(model, rest, spare)[0], expected)
    assert_close_for_dtype(
        act(model, Segment(rest.x[rows], rest.index.rows(rows), None), some)[0], expected[rows]
    )


# 5. Segments with full memory equal one long segment.


@each(CAUSAL)
@given(drawn=segmented_index(moves=ANYWHERE))
@settings(max_examples=5)
def test_full_memory_equals_one_long_segment(spec, drawn):
    index, lengths = drawn
    run = random_segment(spec, index)
    whole, _ = shared_model(replace(spec, memory=None))(run.x, index, context=run.context)
    model = shared_model(replace(spec, memory=XL(sum(lengths)) if spec.has_attention else None))
    parts, _ = learn(model, run, lengths)
    assert_close_for_dtype(parts[run.filled], whole[run.filled])
    batch = index.shape[0]
    none = State.empty(spec.layers, batch, 0, run.x, spec.width)
    start = replace(none, recurrent=model.initial_recurrent_state(batch))
    acted, _ = act(model, run, model.cache(start, sum(lengths), run.context))
    assert_close_for_dtype(acted[run.filled], whole[run.filled])


@each(CAUSAL)
@given(drawn=segmented_index(), memory=st.integers(1, 6))
@settings(max_examples=5)
def test_memory_of_window_length_equals_one_long_segment(spec, drawn, memory):
    index, lengths = drawn
    run, short = random_segment(spec, index), streaming(spec, memory)
    alone = replace(short, memory=None) if type(short.memory) is XL else short
    whole, _ = shared_model(alone)(run.x, index, context=run.context)
    parts, _ = learn(shared_model(short), run, lengths)
    assert_close_for_dtype(parts[run.filled], whole[run.filled])


# 6. Gradients, serialization and number formats.


@each(SPECS)
def test_every_parameter_gets_a_gradient(spec):
    model = new_model(spec).double()
    state = half_full(spec, 2, 1.0) if spec.memory else None
    start = spec.memory.length if spec.memory else 0
    run = random_segment(spec, TokenIndex.range(2, 6, start=start))
    exits = model.exits(run.x, run.index, state, run.context)
    y = exits.outputs
    loss, penalty = (y * numbers(*y.shape, seed=7)).sum(), model.penalty()
    (loss if penalty is None else loss + penalty).backward()
    if (
        exits.auxiliary_loss is not None
        and (lesson := exits.auxiliary_loss(verdict(y, run.index))) is not None
    ):
        lesson.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def verdict(y: Tensor, index: TokenIndex) -> ExitTargets:
    """Return random exit targets for outputs y (N, B, T, C)."""
    drawn = numbers(*y.shape[:3], seed=9)
    return ExitTargets(drawn, drawn > 0, drawn > 0.5, index)


@each(SPECS)
def test_weights_round_trip(spec):
    one, other, run = (
        new_model(spec),
        new_model(spec, seed=1),
        random_segment(spec, TokenIndex.range(2, 6), torch.float32),
    )
    assert not torch.equal(output(one, run), output(other, run))
    other.load_state_dict(one.state_dict())
    assert torch.equal(output(one, run), output(other, run))


@each(SPECS)
def test_copies_and_pickles_of_a_module_compute_the_same(spec):
    """Auxiliary losses of the last forward belong to its graph, so a copy has none of them."""
    model, run = new_model(spec), random_segment(spec, TokenIndex.range(2, 6), torch.float32)
    with torch.no_grad():
        expected = output(model, run)
    for _ in range(2):
        for other in (deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            with torch.no_grad():
                assert torch.equal(output(other, run), expected)
        output(model, run)


@each(SPECS)
def test_forward_without_gradient_releases_the_tensors_of_the_penalty(spec):
    model, run = new_model(spec), random_segment(spec, TokenIndex.range(2, 6), torch.float32)
    with torch.no_grad():
        output(model, run)
        before = model.penalty()
    output(model, run)
    with torch.no_grad():
        output(model, run)
        assert pending_tensors(model) == []
        after = model.penalty()
    assert (before is None) == (after is None)
    assert after is None or torch.equal(before, after)


def pending_tensors(model: Transformer) -> list[str]:
    """Return the modules that keep tensors which depend on earlier tokens."""
    return [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, PendingTerms) and value
    ]


def output(model: Transformer, run: Segment) -> Tensor:
    return model(run.x, run.index, context=run.context)[0]


@each(SPECS)
def test_spec_round_trips(spec):
    read = TransformerSpec.from_json(spec.to_json())
    assert read == spec
    assert repr(read) == repr(spec)
    assert TransformerSpec.from_dict(spec.to_dict()) == spec


@each(SPECS)
def test_bfloat16_is_close_to_float32(spec):
    narrow = new_model(spec).bfloat16()
    wide = new_model(spec).bfloat16().float()
    run = random_segment(spec, random_index(3, 12), torch.bfloat16)
    same = Segment(run.x.float(), run.index, to_float32(run.context))
    y = output(narrow, run)
    assert y.dtype == torch.bfloat16
    assert_near(y[run.filled], output(wide, same)[run.filled], spec)
    y.float().square().sum().backward()
    gradients = [parameter.grad for parameter in narrow.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


def to_float32(context: Context | None) -> Context | None:
    return None if context is None else Context(context.x.float(), context.index)


def assert_near(narrow: Tensor, wide: Tensor, spec: TransformerSpec) -> None:
    """Assert small errors.

    Rounding can move a token to another bucket. In RetNet and DeltaNet it can change the sign of a product of
    query and key, on which the sign of the normalized output of a first token depends.
    """
    assert narrow.isfinite().all()
    error = (narrow.float() - wide).abs() / wide.abs().max()
    assert error.mean() < 0.01
    assert (
        error.max() < 0.1
        or isinstance(spec.kernel, LSH | Routing)
        or isinstance(spec.recurrence, RetNet | DeltaNet)
    )


@each(CAUSAL)
def test_acting_in_bfloat16_is_close_to_learning(spec):
    model, run = new_model(spec).bfloat16(), random_segment(spec, random_index(3, 12), torch.bfloat16)
    cache = model.cache(model.initial_state(3), run.length, run.context)
    acted, _ = act(model, run, cache)
    assert_near(acted[run.filled], output(model, run)[run.filled].float(), spec)
