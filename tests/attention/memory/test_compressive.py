"""Tests of compressive memory: visibility, auxiliary losses and the cost of a step."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlxf.attention import (
    Compressive,
    Full,
    Linformer,
    TokenIndex,
    TransformerSpec,
    Window,
)
from rlxf.attention.inspection import attention_weights
from rlxf.attention.memory.compression import COMPRESSIONS
from tests.attention.oracle import close
from tests.attention.passes import act, assert_attention_equals, learn
from tests.attention.specs import DEFAULT, new_model, shared_model
from tests.attention.worlds import ANYWHERE, numbers, random_index, random_segment, segmented_index

MEMORY = Compressive(2, 2, 2)
SPEC = replace(DEFAULT, memory=MEMORY)
sizes = st.builds(Compressive, st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))


@given(memory=sizes)
@settings(max_examples=30)
def test_each_token_is_visible_once_raw_or_compressed(memory):
    for i in range(3 * memory.length):
        seen = [0] * (i + 1)
        for j in range(i + 1):
            seen[j] += bool(memory.is_raw_visible(torch.tensor(i), torch.tensor(j)))
        for end in range(memory.ratio - 1, i + 1, memory.ratio):
            for j in range(end - memory.ratio + 1, end + 1):
                seen[j] += bool(memory.is_compressed_visible(torch.tensor(i), torch.tensor(end)))
        assert max(seen) == 1
        assert all(seen[max(0, i - memory.max_distance) :])
        assert not any(seen[: max(0, i - memory.length)])
        j = torch.arange(i + 1)
        assert memory.visible_pattern(Full()).mask_mod(torch.tensor(i), j).tolist() == [
            number == 1 for number in seen
        ]


@given(memory=sizes)
@settings(max_examples=30)
def test_state_contains_all_tokens_visible_to_the_next_token(memory):
    now = 3 * memory.length
    j = torch.arange(now)
    seen = j[memory.visible_pattern(Full()).mask_mod(torch.tensor(now), j)]
    assert now - int(seen.min()) <= memory.length


@pytest.mark.parametrize("method", COMPRESSIONS)
@given(drawn=segmented_index(moves=ANYWHERE))
@settings(max_examples=8)
def test_attention_equals_reference_loop(method, drawn):
    index, _ = drawn
    spec = replace(DEFAULT, layers=1, memory=replace(MEMORY, method=method))
    assert_attention_equals(shared_model(spec), random_segment(spec, index), slow_attention)


def slow_attention(block, x: Tensor, index: TokenIndex, t: int) -> Tensor:
    """Compute the attention output of slot t by the formulas of `Compressive`: x (T, C) -> (C,)."""
    here, attention = int(index.position[0, t]), block.attention
    same_episode = [s for s in range(t + 1) if index.episode[0, s] == index.episode[0, t]]
    token = {int(index.position[0, s]): x[s] for s in same_episode}
    seen = []
    for end in range(MEMORY.ratio - 1, here, MEMORY.ratio):
        if MEMORY.recent < here - end <= MEMORY.recent + MEMORY.compressed * MEMORY.ratio:
            inside = [token[j] for j in range(end - MEMORY.ratio + 1, end + 1)]
            seen.append(slow_compression(block, torch.stack(inside)))
    for j in range(here + 1):
        end = j - j % MEMORY.ratio + MEMORY.ratio - 1
        if here <= end + MEMORY.recent:
            seen.append(token[j])
    normed = block.attention_norm.norm(torch.stack([*seen, token[here]]))
    q, k, v = (part.unflatten(-1, (attention.heads, -1)) for part in attention.qkv(normed).chunk(3, dim=-1))
    weights = [(q[-1, h] @ k[:-1, h].T * attention.size**-0.5).softmax(0) for h in range(attention.heads)]
    return attention.out(torch.cat([weight @ v[:-1, h] for h, weight in enumerate(weights)]))


def slow_compression(block, tokens: Tensor) -> Tensor:
    """Compress c tokens (c, C) by the definition of f."""
    module = block.compression.compression
    if hasattr(module, "convolution"):
        weight, bias = module.convolution.weight, module.convolution.bias
        step = module.convolution.dilation[0]
        return sum(weight[..., n] @ tokens[n * step] for n in range(weight.shape[-1])) + bias
    if type(module).__name__ == "MostUsed":
        attention = block.attention
        q, k, _ = attention.qkv(block.attention_norm.norm(tokens)).chunk(3, dim=-1)
        usage = 0
        for head in range(attention.heads):
            part = slice(head * attention.size, (head + 1) * attention.size)
            usage += (q[:, part] @ k[:, part].T * attention.size**-0.5).softmax(-1).sum(0)
        return tokens[usage.argmax()]
    return tokens.mean(0) if type(module).__name__ == "Mean" else tokens.max(0).values


def long_run(spec: TransformerSpec, length: int = 24):
    return random_segment(spec, TokenIndex.range(2, length))


def gradients(model, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    results = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("method", ["convolution", "dilated"])
@pytest.mark.parametrize("loss", ["attention-reconstruction", "auto-encoding"])
def test_task_loss_and_penalty_have_disjoint_gradients(method, loss):
    spec = replace(SPEC, memory=replace(MEMORY, method=method, loss=loss))
    model, run = new_model(spec).double(), long_run(spec)
    y, _ = model(run.x, run.index)
    penalty_gradients = gradients(model, model.penalty())
    task_gradients = gradients(model, (y * numbers(*y.shape)).sum())
    for name in task_gradients:
        compresses = ".compression." in name
        assert (task_gradients[name] != 0).any() != compresses, name
        assert (penalty_gradients[name] != 0).any() == compresses, name


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, layers=3)], ids=["two layers", "three"])
def test_penalty_is_the_weighted_sum_over_layers(spec):
    run, results = long_run(spec), []
    for coef in (1.0, 0.5):
        model = shared_model(replace(spec, memory=replace(MEMORY, loss_coef=coef)))
        model(run.x, run.index)
        results.append(model.penalty().detach())
    close(0.5 * results[0], results[1])
    model, alone = shared_model(spec), []
    for layer, h in enumerate(model.encode(run.x, run.index)[1]):
        recall = model.memory_view(None, run.index)
        alone.append(recall.penalty([h if n == layer else torch.zeros_like(h) for n in range(spec.layers)]))
    silent = model.memory_view(None, run.index).penalty([torch.zeros_like(run.x)] * spec.layers)
    close(sum(alone) - (spec.layers - 1) * silent, results[0])


def test_penalty_is_returned_once_and_is_0_without_compressed_blocks():
    model = shared_model(SPEC)
    for length, nonzero in ((4, False), (24, True)):
        run = long_run(SPEC, length)
        model(run.x, run.index)
        assert (model.penalty() != 0) == nonzero
        assert model.penalty() is None
    with torch.no_grad():
        model(run.x, run.index)
    assert model.penalty() is None


def test_penalty_without_gradient_has_the_same_value():
    model, run = shared_model(SPEC), long_run(SPEC)
    model(run.x, run.index)
    expected = model.penalty()
    model(run.x, run.index)
    with torch.no_grad():
        assert torch.equal(model.penalty(), expected)


def test_penalty_trains_the_free_weights_of_a_partly_frozen_compression():
    model, run = new_model(SPEC).double(), long_run(SPEC)
    convolution = model.blocks[0].compression.compression.convolution
    convolution.bias.requires_grad_(False)
    model(run.x, run.index)
    model.penalty().backward()
    assert convolution.weight.grad.any()
    assert convolution.bias.grad is None


@pytest.mark.parametrize("method", ["mean", "max", "most-used"])
def test_methods_without_parameters_have_no_penalty(method):
    spec = replace(SPEC, memory=replace(MEMORY, method=method))
    model, run = shared_model(spec), long_run(spec)
    model(run.x, run.index)
    assert model.penalty() is None
    assert not any("compression" in name for name, _ in model.named_parameters())


def test_cache_size_is_constant_over_an_episode():
    model, run = shared_model(SPEC), long_run(SPEC, 40)
    cache = model.cache(model.initial_state(2), MEMORY.length + 1)
    sizes = []
    for part in run.cut([1, 39]):
        act(model, part, cache)
        sizes.append([layer.keys.shape[2] for layer in cache.layers])
    assert sizes[0] == sizes[1]
    raw, compressed = MEMORY.recent + MEMORY.ratio, MEMORY.compressed + MEMORY.recent // MEMORY.ratio + 1
    assert set(sizes[0]) == {raw + compressed}


def test_compressed_tokens_influence_outputs_up_to_the_reach():
    model, run = shared_model(replace(SPEC, layers=1)), long_run(SPEC, 3 * MEMORY.length)
    other = run.x.clone()
    other[:, 1] += numbers(2, SPEC.width, seed=1)
    y, z = (learn(model, run.with_tokens(x), [3, run.length - 3])[0] for x in (run.x, other))
    moved = (y - z).abs().amax(-1).amin(0) > 1e-9
    assert moved[1 : MEMORY.max_distance + 2].all()
    assert not moved[MEMORY.max_distance + 2 :].any()


def test_block_weight_is_split_evenly_among_its_tokens():
    run = long_run(replace(SPEC, layers=1))
    (weights,) = attention_weights(shared_model(replace(SPEC, layers=1)), run.x, run.index)
    now = 20
    ends = [
        end for end in range(1, now, 2) if MEMORY.is_compressed_visible(torch.tensor(now), torch.tensor(end))
    ]
    assert len(ends) == MEMORY.compressed
    for end in ends:
        close(weights[:, :, now, end], weights[:, :, now, end - 1])
        assert (weights[:, :, now, end] > 0).all()


def test_rows_complete_their_blocks_at_different_steps():
    """Acting in a batch equals acting row by row: a step compresses only the completed blocks."""
    index = random_index(4, 20, seed=5)
    run = random_segment(SPEC, index)
    model = shared_model(SPEC)
    together, _ = act(model, run, model.cache(model.initial_state(4), MEMORY.length + 1))
    for row in range(4):
        one = torch.tensor([row])
        alone = replace(run, x=run.x[one], index=index.rows(one))
        y, _ = act(model, alone, model.cache(model.initial_state(1), MEMORY.length + 1))
        close(y[alone.filled], together[one][alone.filled])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"recent": 0}, ValueError, "Compressive recent must be at least 1, got 0"),
        ({"compressed": 1.5}, TypeError, "Compressive compressed must be a whole number, got 1.5"),
        ({"ratio": 0}, ValueError, "Compressive ratio must be at least 1, got 0"),
        ({"method": "sum"}, ValueError, "Compressive method must be one of .*, got 'sum'"),
        ({"loss": "none"}, ValueError, "Compressive loss must be one of .*, got 'none'"),
        ({"measure": "max"}, ValueError, "Compressive measure must be one of .*, got 'max'"),
        ({"loss_coef": 0.0}, ValueError, "Compressive loss_coef must be above 0, got 0.0"),
        ({"loss_coef": float("nan")}, ValueError, "Compressive loss_coef must be finite, got nan"),
    ],
)
def test_invalid_options_raise(wrong, error, message):
    with pytest.raises(error, match=message):
        Compressive(**wrong)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"pattern": Window(3)}, "defines the visible tokens itself, and pattern Window"),
        ({"kernel": Linformer()}, "requires a softmax kernel over raw and compressed tokens, got Linformer"),
        ({"causal": False}, "needs causal=True"),
    ],
)
def test_incompatible_settings_raise(other, message):
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **other)


def test_frozen_compression_has_a_penalty_without_gradient():
    model = TransformerSpec(width=16, layers=2, heads=2, memory=MEMORY).build()
    for block in model.blocks:
        block.compression.requires_grad_(False)
    x = torch.randn(2, 12, 16, requires_grad=True)
    y, _ = model(x, TokenIndex.range(2, 12))
    penalty = model.penalty()
    (y.sum() + penalty).backward()
    assert penalty > 0
    assert x.grad.any()
