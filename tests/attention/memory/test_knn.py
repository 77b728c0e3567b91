"""Tests of kNN memory: retrieval, stored tokens, gradients and caches."""

import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from torch.nn import functional as F

from rlxf.attention import (
    KNN,
    LSH,
    Longformer,
    Performer,
    Softmax,
    State,
    TokenIndex,
    Universal,
    Window,
)
from rlxf.attention.inspection import attention_weights
from rlxf.attention.memory import knn_attention as knn_attention
from rlxf.attention.memory.knn_attention import SEARCH_FUNCTIONS
from rlxf.attention.token_index import EMPTY
from tests.attention.oracle import close
from tests.attention.passes import act, assert_attention_equals, assert_close_for_dtype, learn
from tests.attention.specs import DEFAULT, new_model, shared_model
from tests.attention.worlds import ANYWHERE, numbers, random_segment, segmented_index

MEMORY = KNN(2, 5, 2)
SPEC = replace(DEFAULT, memory=MEMORY, pattern=Window(MEMORY.length + 1))
ALONE = replace(SPEC, layers=1)


@given(drawn=segmented_index(moves=ANYWHERE))
@settings(max_examples=15)
def test_attention_equals_reference_loop(drawn):
    index, _ = drawn
    assert_attention_equals(shared_model(ALONE), random_segment(ALONE, index), slow_attention)


def slow_attention(block, x: Tensor, index: TokenIndex, t: int) -> Tensor:
    """Compute the attention output of slot t by the definition: x (T, C) -> (C,)."""
    attention, here = block.attention, int(index.position[0, t])
    slots = [s for s in range(t + 1) if index.episode[0, s] == index.episode[0, t]]
    back = {s: here - int(index.position[0, s]) for s in slots}
    near = [s for s in slots if back[s] <= MEMORY.length]
    far = [s for s in slots if MEMORY.length < back[s] <= MEMORY.length + MEMORY.far]
    q, k, v = attention.qkv(block.attention_norm.norm(x)).chunk(3, dim=-1)
    mixed = []
    for head in range(attention.heads):
        part = slice(head * attention.size, (head + 1) * attention.size)
        scale, g = attention.log_scale[head].exp(), attention.gate[head].sigmoid()

        def average(some, part=part, scale=scale):
            cosines = torch.stack([F.cosine_similarity(q[t, part], k[s, part], dim=0) for s in some])
            best = cosines.topk(min(len(some), MEMORY.top)).indices if some is far else range(len(some))
            weights = torch.stack([scale * cosines[n] for n in best]).softmax(0)
            return sum(weight * v[some[n], part] for weight, n in zip(weights, best, strict=True))

        o = average(near)
        mixed.append(g * average(far) + (1 - g) * o if far else o)
    return attention.out(torch.cat(mixed))


def long_run(spec, length: int = 20):
    return random_segment(spec, TokenIndex.range(2, length))


@given(drawn=segmented_index(moves=ANYWHERE))
@settings(max_examples=10)
def test_faiss_equals_torch(drawn):
    pytest.importorskip("faiss")
    index, lengths = drawn
    model, run = (
        shared_model(replace(SPEC, memory=replace(MEMORY, index="faiss"))),
        random_segment(SPEC, index),
    )
    result, _ = learn(model, run, lengths)
    model.blocks[MEMORY.older_layer(SPEC.layers)].attention.nearest = SEARCH_FUNCTIONS["torch"]
    close(result, learn(model, run, lengths)[0])


def test_missing_faiss_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        ImportError, match=r"requires faiss: run pip install .*\[knn\]', or use index=.torch."
    ):
        replace(SPEC, memory=replace(MEMORY, index="faiss")).build()


def test_influence_ends_at_the_maximum_distance():
    model, run, farthest = shared_model(replace(ALONE, memory=replace(MEMORY, top=5))), long_run(ALONE), 7
    other = run.x.clone()
    other[:, 3] += numbers(2, SPEC.width, seed=1)
    y, z = (learn(model, run.with_tokens(x), [4, 6, 10])[0] for x in (run.x, other))
    moved = (y - z).abs().amax(-1).amin(0) > 1e-9
    assert moved.nonzero()[:, 0].tolist() == list(range(3, 3 + farthest + 1))


@pytest.mark.parametrize("filled", [0, 1, 4, 9])
@pytest.mark.parametrize("ended", [False, True])
def test_unreachable_far_slots_are_dropped(filled, ended):
    """Far slots are dropped if they are empty in all rows or belong to earlier episodes."""
    model, run = shared_model(SPEC), long_run(SPEC, MEMORY.length + filled + 3)
    stored, query = (
        TokenIndex.range(2, run.length - 3),
        TokenIndex.range(2, 3, start=0 if ended else run.length - 3),
    )
    query = TokenIndex(query.position, query.episode + int(ended))
    _, state = model(run.x[:, :-3], stored)
    assert state.older.relevant_to(query).index.shape == (2, 0 if ended else min(filled, MEMORY.far))
    y, _ = model(run.x[:, -3:], query, state)
    close(y, model(run.x, stored.concatenate(query))[0][:, -3:])


@given(drawn=segmented_index(moves=ANYWHERE))
def test_far_slots_of_current_episodes_are_kept(drawn):
    index, (length, *_) = drawn
    assume(length < index.shape[1])
    run = random_segment(SPEC, index)
    older = State(run.x[None, :, :length], index.at(slice(0, length)))
    query = index.at(slice(length, None))
    kept = older.relevant_to(query).index.shape[1]
    gone = older.index.episode[:, : length - kept, None]
    assert not ((gone == query.episode[:, None]) & (gone != EMPTY)).any()


def test_only_the_knn_layer_stores_far_tokens():
    run = long_run(SPEC)
    _, state = shared_model(SPEC)(run.x, run.index)
    assert state.hidden.shape == (SPEC.layers, 2, MEMORY.length, SPEC.width)
    assert state.older.hidden.shape == (1, 2, MEMORY.far, SPEC.width)
    _, hidden = shared_model(SPEC).encode(run.x, run.index)
    close(state.older.hidden[0], hidden[1][:, -7:-2].detach())
    chosen = state.rows(torch.tensor([1]))
    assert torch.equal(chosen.older.hidden, state.older.hidden[:, 1:])
    assert not state.older.hidden.requires_grad


@pytest.mark.parametrize(("layers", "number"), [(1, 0), (2, 1), (4, 2), (12, 8)])
def test_default_layer_is_at_three_quarters_of_the_depth(layers, number):
    assert KNN().older_layer(layers) == number
    results = [isinstance(KNN().for_layer(n, layers), KNN) for n in range(layers)]
    assert results == [n == number for n in range(layers)]


def test_retrieved_tokens_get_no_gradient():
    """Token 3 is a far token of the last one, and with one layer there is no other path between them."""
    model, run = shared_model(ALONE), long_run(ALONE, 9)
    x = run.x.requires_grad_()
    y, _ = model(x, run.index)
    (gradient,) = torch.autograd.grad((y[:, -1] * numbers(2, SPEC.width)).sum(), x)
    assert (gradient[:, :6] == 0).all()
    assert (gradient[:, 6:] != 0).all()


def test_gate_has_no_effect_without_far_tokens():
    one, other, run = new_model(ALONE).double(), new_model(ALONE).double(), long_run(ALONE, 3)
    with torch.no_grad():
        other.blocks[0].attention.gate += 3.0
    close(one(run.x, run.index)[0], other(run.x, run.index)[0])


def test_chunked_search_equals_unchunked(monkeypatch):
    run = long_run(SPEC)
    whole, _ = shared_model(SPEC)(run.x, run.index)
    monkeypatch.setattr(knn_attention, "MAX_SCORES", 1)
    parts, _ = shared_model(SPEC)(run.x, run.index)
    assert torch.equal(whole, parts)


def act_steps(model, run, cache, copies: bool) -> list[Tensor]:
    """Return the outputs of each step, with a copied cache per step or with one cache in place."""
    outputs = []
    for part in run.cut([1] * run.length):
        cache = cache.copy() if copies else cache
        outputs.append(act(model, part, cache)[0])
    return outputs


@pytest.mark.parametrize("age", [0, 3, 41, 43, 46, 60])
def test_copies_of_a_cache_are_independent(age):
    """Copies and the original continue independently with interleaved steps."""
    spec = replace(SPEC, memory=replace(MEMORY, far=40))
    model, run = shared_model(spec), long_run(spec, age + 20)
    start, rest = run.part(0, age), run.part(age, age + 20)
    continuations = [rest, rest.with_tokens(-rest.x), rest.with_tokens(rest.x.flip(1))]
    caches, expected = [model.cache(model.initial_state(2), MEMORY.length + 1) for _ in continuations], []
    for continuation, cache in zip(continuations, caches, strict=True):
        for part in (start, continuation):
            alone = act_steps(model, part, cache, copies=False)
        expected.append(torch.cat(alone, dim=1))
    cache = model.cache(model.initial_state(2), MEMORY.length + 1)
    act_steps(model, start, cache, copies=False)
    caches, results = [cache.copy(), cache.copy(), cache], []
    for t in range(rest.length):
        caches = [one.copy() if t % 3 else one for one in caches]
        steps = [
            act(model, continuation.part(t, t + 1), one)[0]
            for continuation, one in zip(continuations, caches, strict=True)
        ]
        results.append(torch.stack(steps))
    for result, alone in zip(torch.cat(results, dim=2), expected, strict=True):
        assert_close_for_dtype(result, alone)


def test_cache_compacted_in_inference_mode_is_writable_outside():
    spec = replace(SPEC, memory=replace(MEMORY, far=40))
    model, run = shared_model(spec), long_run(spec, 30)
    cache, other = (model.cache(model.initial_state(2), MEMORY.length + 1) for _ in range(2))
    results = []
    for t in range(run.length):
        with torch.inference_mode(t % 9 < 7):
            results.append(act(model, run.part(t, t + 1), cache)[0].clone())
    expected = act(model, run, other)[0]
    assert_close_for_dtype(torch.cat(results, dim=1), expected)


def test_a_cache_from_a_copy_in_inference_mode_is_writable_outside():
    """A step in inference mode may create the buffer of far tokens, which other copies share."""
    model = shared_model(SPEC)
    x, index = numbers(2, 8), TokenIndex.range(2, 1)
    with torch.inference_mode():
        cache = model.cache(model.initial_state(2), MEMORY.length + 1)
    y, _ = model.step(x, index, cache.copy())
    expected, _ = model.step(x, index, model.cache(model.initial_state(2), MEMORY.length + 1))
    assert_close_for_dtype(y, expected)


def test_repeated_copies_rarely_move_the_buffer():
    memory = replace(MEMORY, far=64)
    spec = replace(SPEC, memory=memory)
    model, run, moves = shared_model(spec), long_run(spec, 3 * memory.capacity), 0
    cache = model.cache(model.initial_state(2), memory.length + 1)
    for part in run.cut([1] * run.length):
        before, cache = cache, cache.copy()
        act(model, part, cache)
        moves += cache.layers[1].far.keys.data_ptr() != before.layers[1].far.keys.data_ptr()
    assert moves <= 8 * run.length / memory.capacity


def test_cache_size_is_constant_over_an_episode():
    model, run = shared_model(SPEC), long_run(SPEC, 40)
    cache = model.cache(model.initial_state(2), MEMORY.length + 1)
    sizes = []
    for part in run.cut([1, 39]):
        act(model, part, cache)
        sizes.append((cache.layers[1].far.keys.shape[2], cache.layers[1].keys.shape[2]))
    assert sizes[0] == sizes[1]
    assert MEMORY.capacity + 1 <= sizes[0][0] <= 1.25 * (MEMORY.capacity + 1) + 1
    assert sizes[0][1] == MEMORY.length + 1


def test_weights_times_values_equal_layer_output():
    run = long_run(ALONE, 8)
    model, outputs = shared_model(ALONE), []
    hook = model.blocks[0].attention.register_forward_hook(
        lambda module, inputs, y: outputs.append((inputs, y))
    )
    (weights,) = attention_weights(model, run.x, run.index)
    hook.remove()
    ((x, *_), y), attention = outputs[0], model.blocks[0].attention
    mixed = weights @ attention.split(attention.qkv(x))[-1]
    assert_close_for_dtype(attention.out(mixed.transpose(1, 2).flatten(2)), y)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"length": 0}, ValueError, "KNN memory length must be at least 1, got 0"),
        ({"far": 2.5}, TypeError, "KNN memory far must be a whole number, got 2.5"),
        ({"top": 0}, ValueError, "KNN memory top must be at least 1, got 0"),
        ({"far": 4, "top": 5}, ValueError, "KNN top must be at most far=4, got 5"),
        ({"layer": 0}, ValueError, "KNN layer must be at least 1, got 0"),
    ],
)
def test_invalid_options_raise(wrong, error, message):
    with pytest.raises(error, match=message):
        KNN(**wrong)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"memory": KNN(layer=3)}, "must be at most the number of layers, 2"),
        ({"kernel": Performer()}, "requires a softmax over all visible keys, got Performer"),
        ({"kernel": LSH()}, "requires a softmax over all visible keys, got LSH"),
        ({"pattern": Longformer()}, "uses one projection for all tokens of a layer, but Longformer"),
        ({"depth": Universal()}, "reuses layers"),
        ({"causal": False}, "needs causal=True"),
    ],
)
def test_incompatible_settings_raise(other, message):
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **other)


def test_softmax1_is_a_softmax():
    assert replace(SPEC, kernel=Softmax(softmax1=True)).build()
