"""Tests of Linformer: projections, parameter sharing and the causal block form."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlxf.attention import Full, Linformer, Softmax, Strided, TokenIndex, TransformerSpec, Window
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels.linformer import LinformerAttention, StartsAtBlockBoundary
from rlxf.attention.token_index import EMPTY
from tests.attention.largest_tensor import LargestTensor
from tests.attention.oracle import close, put
from tests.attention.specs import DEFAULT, new_model
from tests.attention.worlds import ANYWHERE, index_of, numbers

METHODS = ("learned", "convolution", "mean", "max")
HEADS, SIZE = 2, 3


def kernel(spec: Linformer) -> LinformerAttention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return spec.build(HEADS * SIZE, HEADS).double()


def tensors(index: TokenIndex) -> list[Tensor]:
    """Return random queries, keys and values."""
    return [numbers(index.shape[0], HEADS, index.shape[1], SIZE, seed=seed) for seed in range(3)]


def self_relation(index: TokenIndex, causal: bool = True) -> AttentionMask:
    return AttentionMask(index, index, Full(), causal, torch.float64)


# The causal form against a reference loop.


def summaries(module: LinformerAttention, x: Tensor, head: int, keys: bool) -> list[Tensor]:
    """Compute the summaries of the n tokens x (n, D) of a block by loops."""
    spec, projection = module.spec, module.key_projection if keys else module.value_projection
    piece = spec.length // spec.k
    parts = [range(r * piece, (r + 1) * piece) for r in range(spec.k)]
    if spec.method == "mean":
        return [sum(x[t] for t in part) / piece for part in parts]
    if spec.method == "max":
        return [torch.stack([x[t] for t in part]).max(0).values for part in parts]
    weight = projection.weight[head % len(projection.weight)]
    if spec.method == "learned":
        return [sum(weight[t, r] * x[t] for t in range(spec.length)) for r in range(spec.k)]
    return [sum(weight[:, :, t - part.start] @ x[t] for t in part) for part in parts]


def reference(
    module: LinformerAttention, q: Tensor, k: Tensor, v: Tensor, index: TokenIndex, pattern
) -> Tensor:
    """Compute causal Linformer one query at a time; 0 at empty slots."""
    tokens_of_row = [
        list(zip(index.episode[b].tolist(), index.position[b].tolist(), strict=True)) for b in range(len(q))
    ]
    y, size = torch.zeros_like(q), module.spec.length
    for b, h, i in ((b, h, i) for b in range(len(q)) for h in range(HEADS) for i in range(q.shape[2])):
        episode, here = tokens_of_row[b][i]
        if episode == EMPTY:
            continue
        seen = {
            key_position: slot
            for slot, (other, key_position) in enumerate(tokens_of_row[b])
            if other == episode
            and key_position <= here
            and pattern.mask_mod(torch.tensor(here), torch.tensor(key_position))
        }
        keys, values = [], []
        for start in range(0, here + 1, size):
            block = [seen[t] for t in range(start, start + size) if t in seen]
            if len(block) == size and start + size <= here - here % size:
                keys += summaries(module, k[b, h, block], h, True)
                values += summaries(module, v[b, h, block], h, False)
            else:
                keys, values = [*keys, *k[b, h, block]], [*values, *v[b, h, block]]
        scores = torch.stack([q[b, h, i] @ key / math.sqrt(SIZE) for key in keys])
        y[b, h, i] = scores.softmax(0) @ torch.stack(values)
    return y


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pattern", [Full(), Window(7), Strided(3)], ids=repr)
@given(moves=st.lists(st.lists(st.sampled_from(ANYWHERE), min_size=12, max_size=12), min_size=2, max_size=2))
@settings(max_examples=3)
def test_causal_form_equals_reference_loop(method, pattern, moves):
    index = index_of(moves)
    module = kernel(Linformer(4, 2, method, "head" if method == "learned" else "none"))
    q, k, v = tensors(index)
    results = module(q, k, v, None, replace(self_relation(index), pattern=pattern))
    filled = (index.episode != EMPTY)[:, None, :, None]
    close(torch.where(filled, results, 0.0), reference(module, q, k, v, index, pattern), 1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("start", "length"), [(0, 16), (8, 18), (0, 11)])
def test_blockwise_path_equals_general_path(method, start, length, monkeypatch):
    module, index = kernel(Linformer(4, 2, method)), TokenIndex.range(2, length, start)
    assert StartsAtBlockBoundary(4)(self_relation(index))
    results = []
    for general in (False, True):
        mask = self_relation(index)
        if general:
            monkeypatch.setattr(StartsAtBlockBoundary, "__call__", lambda *_: False)
        inputs = [x.requires_grad_() for x in tensors(index)]
        y = module(*inputs, None, mask)
        wanted = [*inputs, *module.parameters()]
        results.append((y, *torch.autograd.grad((y * numbers(*y.shape, seed=4)).sum(), wanted)))
    for fast, dense in zip(*results, strict=True):
        close(fast, dense, 1e-10)


EPISODES = TokenIndex(
    torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
)
PADDED = TokenIndex(torch.arange(-3, 9)[None], torch.tensor([[EMPTY] * 3 + [0] * 9]))


@pytest.mark.parametrize(
    "index",
    [EPISODES, PADDED, TokenIndex.range(1, 12, start=2), TokenIndex.range(1, 8)],
    ids=["two", "padded", "cut", "few"],
)
def test_irregular_rows_use_the_general_path(index):
    assert not StartsAtBlockBoundary(4)(self_relation(index))


# Encoders.


@pytest.mark.parametrize("method", METHODS)
def test_unused_positions_have_no_effect(method):
    """A longer projection with the same first rows gives the same result."""
    short, long = (
        kernel(Linformer(6, 3, method)),
        kernel(Linformer(24, 12 if method != "learned" else 3, method)),
    )
    for one, other in zip(short.parameters(), long.parameters(), strict=True):
        put(other[:, :6] if method == "learned" else other, one)
    inputs, mask = tensors(TokenIndex.range(2, 5)), self_relation(TokenIndex.range(2, 5), causal=False)
    close(long(*inputs, None, mask), short(*inputs, None, mask), 1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_episodes_of_a_row_are_projected_separately(method):
    module, (q, k, v) = kernel(Linformer(8, 4, method)), tensors(EPISODES)
    together = module(q, k, v, None, self_relation(EPISODES, causal=False))
    for some in (slice(0, 3), slice(3, 9)):
        apart = module(
            *(x[:, :, some] for x in (q, k, v)), None, self_relation(EPISODES.at(some), causal=False)
        )
        close(together[:, :, some], apart, 1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_encoder_rejects_sequences_longer_than_length(causal):
    spec = replace(DEFAULT, kernel=Linformer(5, 2), causal=causal)
    model, x = new_model(spec), numbers(1, 6, spec.width, dtype=torch.float32)
    model(x[:, :5], TokenIndex.range(1, 5))
    if causal:
        model(x, TokenIndex.range(1, 6))
        return
    with pytest.raises(
        ValueError, match=r"length=5.* supports sequences of at most 5 tokens, got position 5"
    ):
        model(x, TokenIndex.range(1, 6))


@pytest.mark.parametrize(("method", "k"), [("learned", 4), ("convolution", 64), ("mean", 64), ("max", 64)])
def test_memory_is_below_quadratic(method, k):
    length = 512
    spec = replace(DEFAULT, layers=1, heads=1, causal=False, kernel=Linformer(length, k, method))
    model, x = new_model(spec), numbers(1, length, spec.width, dtype=torch.float32)
    with LargestTensor() as largest:
        model(x, TokenIndex.range(1, length))[0].sum().backward()
    assert length * spec.width <= largest.size < length**2 / 3


# Parameter sharing.


@pytest.mark.parametrize("method", ["learned", "convolution"])
@pytest.mark.parametrize(
    ("sharing", "matrices"), [("none", 3 * 2 * HEADS), ("head", 3 * 2), ("key-value", 3), ("layer", 1)]
)
def test_number_of_projections(method, sharing, matrices):
    spec = replace(DEFAULT, layers=3, heads=HEADS, kernel=Linformer(4, 2, method, sharing))
    with_k, without = (
        sum(parameter.numel() for parameter in replace(spec, kernel=one).build().parameters())
        for one in (spec.kernel, Softmax())
    )
    size = spec.width // HEADS
    assert with_k - without == matrices * (4 * 2 if method == "learned" else size * size * 2)


def test_shared_projection_is_one_parameter():
    model = new_model(replace(DEFAULT, kernel=Linformer(2, 1, sharing="layer")))
    index = TokenIndex.range(1, 6)
    model(numbers(1, 6, 8, dtype=torch.float32), index)[0].sum().backward()
    first, second = (block.attention.kernel for block in model.blocks)
    assert first.key_projection is first.value_projection is second.key_projection is second.value_projection
    assert first.key_projection.weight.grad.abs().min() > 0


def test_number_of_summaries_per_layer():
    model = replace(DEFAULT, kernel=Linformer(4, (3, 1))).build()
    assert [block.attention.kernel.key_projection.weight.shape[2] for block in model.blocks] == [3, 1]


# Inspection and dropout.


@pytest.mark.parametrize("method", ["convolution", "mean", "max"])
def test_summary_weight_is_split_evenly(method):
    index = TokenIndex.range(1, 8)
    q, k, _ = tensors(index)
    weights = kernel(Linformer(8, 2, method)).inspect_weights(q, k, None, self_relation(index, causal=False))
    close(weights.sum(-1), torch.ones(1, HEADS, 8, dtype=torch.float64))
    pieces = weights.unflatten(-1, (2, 4))
    close(pieces, pieces[..., :1].expand_as(pieces), 1e-12)


def test_dropout_drops_summaries():
    index = TokenIndex.range(1, 8)
    q, k, _ = tensors(index)
    module, mask = kernel(Linformer(8, 4, "mean")), self_relation(index, causal=False)
    weights = module.inspect_weights(q, k, None, mask)
    module.dropout = 0.5
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropped = module.inspect_weights(q, k, None, mask) / weights
    assert set(dropped.round(decimals=9).unique().tolist()) == {0.0, 2.0}


# Invalid options.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linformer(0), "Linformer length must be at least 1, got 0"),
        (lambda: Linformer(2.5), "Linformer length must be a whole number, got 2.5"),
        (lambda: Linformer(8, 0), "Linformer k must be at least 1, got 0"),
        (lambda: Linformer(8, (2, "4")), "Linformer k must be a whole number, got '4'"),
        (lambda: Linformer(8, ()), "Linformer k must be a number or a tuple with a number for each layer"),
        (lambda: Linformer(8, 9), "Linformer k must be at most length=8, got 9"),
        (lambda: Linformer(8, 3, "mean"), "Linformer k must divide length=8 with method='mean', got 3"),
        (lambda: Linformer(method="sum"), "Linformer method must be one of"),
        (lambda: Linformer(sharing="heads"), "Linformer sharing must be one of"),
        (lambda: Linformer(8, (2, 4), sharing="layer"), "the same k in all layers, got k=(2, 4)"),
        (
            lambda: Linformer(8, 2, "max", bias=True),
            "bias=True requires method='learned' or 'convolution', got 'max'",
        ),
        (lambda: TransformerSpec(layers=3, kernel=Linformer(8, (2, 4))), "has 2 values of k for 3 layers"),
        (
            lambda: TransformerSpec(kernel=Linformer(), pattern=Window(3), causal=False),
            "projects the whole sequence, and Window(size=3) hides a part of it",
        ),
        (
            lambda: TransformerSpec(kernel=Linformer(), cross_attention=True),
            "Linformer(length=32, k=8, method='learned', sharing='head', bias=False) projects the keys of "
            "self-attention and does not support cross_attention=True",
        ),
    ],
)
def test_invalid_options_raise(make, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


def test_k_per_layer_json_round_trips():
    spec = TransformerSpec(kernel=Linformer(8, (2, 4)))
    assert TransformerSpec.from_json(spec.to_json()) == spec
