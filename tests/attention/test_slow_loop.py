"""Attention equals the formulas of the papers, computed pair by pair: outputs, gradients and weights."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlxf.attention import (
    FIRE,
    KERPLE,
    ALiBi,
    CoPE,
    Deberta,
    DistanceAware,
    ETCLabels,
    Full,
    RoPE,
    ShawRelative,
    Softmax,
    T5Bias,
    TokenIndex,
    Tupe,
    Window,
    XLRelative,
    XPos,
)
from rlxf.attention.attention import Attention
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.attention_options import AttentionArguments
from rlxf.attention.positions.base import LayerPosition, PositionEmbedding
from rlxf.attention.registry import TECHNIQUES
from tests.attention import slow
from tests.attention.oracle import close
from tests.attention.worlds import ANYWHERE, index_of, numbers
from tests.covering import covering

WIDTH, HEADS = 8, 2
POSITIONS = {
    "no position": None,
    "ALiBi": ALiBi(),
    "RoPE": RoPE(),
    "RoPE, yarn": RoPE(scaling="yarn", factor=4.0, original_length=900),
    "RoPE, dynamic": RoPE(scaling="dynamic", factor=4.0, original_length=6),
    "XLRelative": XLRelative(),
    "ShawRelative": ShawRelative(3),
    "T5Bias": T5Bias(buckets=8, max_distance=9),
    "Tupe": Tupe(16, buckets=8, max_distance=9),
    "Deberta": Deberta(4),
    "Deberta, paper's form": Deberta(4, form="paper"),
    "DistanceAware": DistanceAware(),
    "ETCLabels": ETCLabels(3, 2),
    "ETCLabels, segments": ETCLabels(2, 3, segment=2),
    "XPos": XPos(scale_base=6.0),
    "KERPLE": KERPLE(),
    "KERPLE, power": KERPLE("power"),
    "FIRE": FIRE(hidden=6, threshold=5.0),
}


DENOMINATORS = {"softmax": False, "softmax1": True}


def test_every_attention_position_has_a_reference_loop():
    outside = {
        technique
        for technique in TECHNIQUES["position"].values()
        for embedding in [type(technique().build_embedding(WIDTH, HEADS))]
        if embedding.forward is not PositionEmbedding.forward
        or embedding.pass_embedding is not PositionEmbedding.pass_embedding
    }
    pairwise = set(TECHNIQUES["position"].values()) - outside - {CoPE}  # CoPE's scores depend on other keys.
    assert set(slow.SCORES) - {type(None)} == pairwise
    assert {type(position) for position in POSITIONS.values()} == set(slow.SCORES)
    assert all(type(technique().build(WIDTH, HEADS)) is LayerPosition for technique in outside)


def scattered(slots: int) -> st.SearchStrategy[TokenIndex]:
    """Strategy for arbitrary positions and episodes in any slot, which need the gather."""
    one = st.lists(st.tuples(st.integers(0, 15), st.integers(-1, 1)), min_size=slots, max_size=slots)
    rows = st.lists(one, min_size=2, max_size=2).map(torch.tensor)
    return rows.map(lambda both: TokenIndex(both[..., 0], both[..., 1]))


def contiguous(slots: int) -> st.SearchStrategy[TokenIndex]:
    """Strategy for contiguous segments with episode boundaries, which allow the shifted view."""
    one = st.lists(st.sampled_from(ANYWHERE), min_size=slots, max_size=slots)
    return st.lists(one, min_size=2, max_size=2).map(index_of)


@st.composite
def masks(draw: st.DrawFn) -> AttentionMask:
    queries, memory = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    kind = draw(st.sampled_from([scattered, contiguous]))
    key = draw(kind(queries + memory))
    pattern = draw(st.one_of(st.just(Full()), st.integers(1, 8).map(Window)))
    return AttentionMask(key.last(queries), key, pattern, draw(st.booleans()), torch.float64)


def attention(position, softmax1: bool, causal: bool) -> Attention:
    """Create attention with the shared position module attached, for the reference loops."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Attention(AttentionArguments(WIDTH, HEADS, position, Softmax(softmax1)))
        module.shared = position.build_embedding(WIDTH, HEADS) if position else None
        module.causal = causal
        module = module.double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.3 * torch.randn(parameter.shape)
    return module


def rule(mask: AttentionMask):
    reach = mask.pattern.max_distance
    return lambda i, j: abs(i - j) <= reach and (i >= j or not mask.causal)


@covering(1, position=POSITIONS, softmax1=DENOMINATORS)
@given(mask=masks())
@settings(max_examples=30)
def test_attention_equals_reference_loop(position, softmax1, mask):
    module = attention(position, softmax1, mask.causal)
    mask = replace(mask, position=module.shared)
    batch, queries = mask.query.shape
    x = numbers(batch, queries, WIDTH).requires_grad_()
    memory = numbers(batch, mask.key.shape[1] - queries, WIDTH, seed=1).requires_grad_()
    y = module(x, module.project(memory), mask)
    expected = slow.attend(module, type(position), x, memory, mask.key, rule(mask))
    close(y, expected, 1e-10)
    actual, reference = gradients(y, module, x, memory), gradients(expected, module, x, memory)
    for gradient, other in zip(actual, reference, strict=True):
        close(gradient, other, 1e-9)


@covering(1, position=POSITIONS, softmax1=DENOMINATORS)
@given(mask=masks())
@settings(max_examples=15)
def test_attention_weights_equal_reference_loop(position, softmax1, mask):
    module = attention(position, softmax1, mask.causal)
    mask = replace(mask, position=module.shared)
    batch, queries = mask.query.shape
    x, memory = (
        numbers(batch, queries, WIDTH),
        numbers(batch, mask.key.shape[1] - queries, WIDTH, seed=1),
    )
    expected = slow.weights(module, slow.SCORES[type(position)], x, memory, mask.key, rule(mask))
    close(module.weights(x, module.project(memory), mask), expected, 1e-10)


def test_contextual_positions_equal_the_formula():
    index = TokenIndex.range(2, 7)
    module = attention(CoPE(4), False, True)
    mask = AttentionMask(index.last(4), index, Window(5), True, torch.float64)
    q, k = numbers(2, HEADS, 4, 4), numbers(2, HEADS, 7, 4, seed=1)
    bias = module.position.bias(q, k, mask, None)
    for b, head, i, j in mask.allowed_by_head.expand_as(bias).nonzero().tolist():
        gates = [(q[b, head, i] @ k[b, head, t] / 2).sigmoid() for t in range(j, i + 4)]
        close(bias[b, head, i, j], interpolated(module.position.vectors @ q[b, head, i], sum(gates)), 1e-10)


def interpolated(scores: Tensor, position: Tensor) -> Tensor:
    """Interpolate scores (P,) at a position of at most P - 1."""
    position = position.clamp(max=len(scores) - 1)
    low, high = int(position.floor()), int(position.ceil())
    return (1 - (position - low)) * scores[low] + (position - low) * scores[high]


def gradients(y: Tensor, module: Attention, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a weighted sum of y; 0 for inputs without effect."""
    leaves = (*module.parameters(), *inputs)
    if not y.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    loss = (y * numbers(*y.shape, seed=2)).sum()
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", ["Sinusoidal", "LearnedAbsolute", "Floater"])
@given(index=scattered(6))
@settings(max_examples=10)
def test_embeddings_depend_on_positions_only(name, index):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        embedding = TECHNIQUES["position"][name]().build_embedding(WIDTH, HEADS).double()
    x = numbers(*index.shape, WIDTH)
    y = embedding(x, index.position)
    one = embedding(torch.zeros(1, 16, WIDTH, dtype=torch.float64), torch.arange(16)[None])[0]
    for row, positions in enumerate(index.position.tolist()):
        for slot, position in enumerate(positions):
            close(y[row, slot], x[row, slot] + one[position], 1e-12)
