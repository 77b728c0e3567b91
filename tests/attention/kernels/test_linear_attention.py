"""Performer and RFA: pairwise, chunked and recurrent forms agree; properties of each kernel."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlxf.attention import RFA, XL, Full, Performer, RoPE, TokenIndex, Transformer, TransformerSpec, Window
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.kernels import linear_attention
from rlxf.attention.kernels.linear_attention import uses_running_sums
from rlxf.attention.kernels.performer import orthogonal_rows
from rlxf.attention.kernels.rfa import cumulative_sum_by_episode
from rlxf.attention.sparse import plan
from rlxf.attention.token_index import EMPTY
from tests.attention.largest_tensor import LargestTensor
from tests.attention.passes import act, assert_close_for_dtype
from tests.attention.specs import each, new_model
from tests.attention.worlds import Segment, numbers, segmented_index

SMALL = TransformerSpec(width=8, heads=2, layers=2, feed_forward=12)
KERNELS = {
    "Performer": Performer(6),
    "Performer, relu": Performer(6, "relu"),
    "RFA": RFA(32, sigma=2.0),
    "RFA, gated": RFA(32, sigma=2.0, gate=True, gate_bias=1.0),
}
SPECS = {name: replace(SMALL, kernel=kernel) for name, kernel in KERNELS.items()}
WITH_MEMORY = {name: replace(spec, memory=XL(7), position=RoPE()) for name, spec in SPECS.items()}
ENCODERS = {
    f"encoder, {name}": replace(spec, causal=False)
    for name, spec in SPECS.items()
    if not getattr(spec.kernel, "gate", False)
}
LENGTH = 20


@pytest.fixture
def chunks(monkeypatch):
    """Use short chunks. The returned function sets the size below which pairs are computed."""
    monkeypatch.setattr(linear_attention, "CAUSAL_CHUNK", 3)
    monkeypatch.setattr(linear_attention, "BIDIRECTIONAL_CHUNK", 3)
    return lambda few: monkeypatch.setattr(linear_attention, "MAX_PAIRS", few)


def padded_index(length: int = LENGTH) -> TokenIndex:
    """Return one episode per row; the first row starts with empty slots."""
    index = TokenIndex.range(2, length, start=5)
    first = torch.arange(length) < 4
    return TokenIndex(
        index.position, index.episode.masked_fill(first & (torch.arange(2) == 0)[:, None], EMPTY)
    )


def outputs_and_gradients(model: Transformer, x: Tensor, index: TokenIndex, state=None) -> list[Tensor]:
    """Return the outputs of non-empty slots and all gradients."""
    x = x.detach().requires_grad_()
    y, _ = model(x, index, state)
    filled = y[index.episode != EMPTY]
    weights = [x, *model.parameters()]
    return [filled.detach(), *torch.autograd.grad((filled * numbers(*filled.shape, seed=1)).sum(), weights)]


def compare_chunked_with_pairs(model: Transformer, chunks, index: TokenIndex, state=None) -> None:
    x, both = numbers(*index.shape, model.spec.width), []
    for few in (0, 2**40):
        chunks(few)
        key = index if state is None else state.index.concatenate(index)
        assert uses_running_sums(model.attention_mask(index, key)) == (few == 0)
        both.append(outputs_and_gradients(model, x, index, state))
    for one, other in zip(*both, strict=True):
        assert_close_for_dtype(one, other)


@each(SPECS | ENCODERS)
def test_chunked_equals_pairs(spec, chunks):
    compare_chunked_with_pairs(new_model(spec).double(), chunks, padded_index())


@each(WITH_MEMORY)
@pytest.mark.parametrize("before", [2, 9])
def test_chunked_equals_pairs_with_memory(spec, before, chunks):
    """The state is half empty or full."""
    model = new_model(spec).double()
    _, state = model(numbers(2, before, spec.width, seed=2), TokenIndex.range(2, before))
    compare_chunked_with_pairs(model, chunks, TokenIndex.range(2, LENGTH, start=before), state)


@each(SPECS | ENCODERS)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_chunked_float32_is_accurate(spec, scale, chunks):
    """Large queries and keys, with exponents beyond the range of float32, are accurate, too."""
    model, index = new_model(spec), padded_index()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight[: 2 * spec.width] *= scale
    x = numbers(*index.shape, spec.width)
    exact = model.double()(x, index)[0][index.episode != EMPTY]
    for few in (0, 2**40):
        chunks(few)
        y, _ = model.float()(x.float(), index)
        torch.testing.assert_close(
            y[index.episode != EMPTY].double(), exact, rtol=0, atol=2e-5 * max(1.0, scale)
        )


@each(SPECS)
def test_chunked_form_is_causal(spec, chunks):
    chunks(0)
    model, trials = new_model(spec), 40
    index, moment = TokenIndex.range(trials, LENGTH), torch.arange(trials) % LENGTH
    x = numbers(trials, LENGTH, spec.width, dtype=torch.float32)
    changed = x.clone()
    changed[torch.arange(trials), moment] += 100 * numbers(trials, spec.width, seed=3, dtype=torch.float32)
    y, z = (model(tokens, index)[0] for tokens in (x, changed))
    earlier = torch.arange(LENGTH) < moment[:, None]
    assert torch.equal(y[earlier], z[earlier])
    assert (y - z).abs().amax(-1)[torch.arange(trials), moment].min() > 1e-6


@each(SPECS | ENCODERS)
def test_empty_slots_have_no_effect(spec, chunks):
    chunks(0)
    model, index = new_model(spec).double(), padded_index()
    empty = (index.episode == EMPTY)[..., None]
    x = numbers(*index.shape, spec.width)
    noisy = torch.where(empty, 1e4 * numbers(*x.shape, seed=4), x)
    results = (outputs_and_gradients(model, tokens, index) for tokens in (x, noisy))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("causal", [True, False])
def test_queries_without_keys_output_0(causal, chunks):
    spec = replace(SMALL, kernel=Performer(6), causal=causal)
    nothing = TokenIndex.empty(2, LENGTH)
    chunks(0)
    attention = new_model(spec).blocks[0].attention
    x = numbers(2, LENGTH, spec.width, dtype=torch.float32).requires_grad_()
    y = attention(x, None, AttentionMask(nothing, nothing, Full(), causal, torch.float32))
    assert (y == 0).all()
    y.sum().backward()
    assert (x.grad == 0).all()


@pytest.mark.parametrize(
    ("pattern", "index"),
    [
        (Window(9), TokenIndex.range(1, LENGTH)),
        (Full(), TokenIndex(torch.arange(LENGTH)[None] % 10, torch.arange(LENGTH)[None] // 10)),
        (Full(), TokenIndex(2 * torch.arange(LENGTH)[None], torch.zeros(1, LENGTH, dtype=torch.long))),
    ],
    ids=["window", "two episodes", "gaps"],
)
def test_irregular_layout_is_computed_by_pairs(pattern, index, chunks):
    chunks(0)
    assert not uses_running_sums(AttentionMask(index, index, pattern, True, torch.float32))


LONG = 512


@each(SPECS | ENCODERS)
def test_memory_is_below_quadratic(spec):
    spec = replace(spec, kernel=replace(spec.kernel, features=8), heads=1, layers=1)
    model, x = new_model(spec), numbers(1, LONG, spec.width, dtype=torch.float32)
    with LargestTensor() as largest:
        y, _ = model(x, TokenIndex.range(1, LONG))
        y.sum().backward()
    assert LONG * spec.width <= largest.size < LONG**2 / 3


@each(SPECS | ENCODERS)
def test_running_sums_need_no_sparse_plan(spec, monkeypatch):
    """The groups of a plan with the pattern `Full` contain all pairs."""
    groups = []
    monkeypatch.setattr(plan, "group_span", lambda *args: groups.append(args) or [])
    new_model(spec)(numbers(1, LONG, spec.width).float(), TokenIndex.range(1, LONG))
    assert not groups


# Acting.


@each(SPECS)
def test_cache_size_is_constant_over_an_episode(spec):
    model, x = new_model(spec), numbers(2, LENGTH, spec.width, dtype=torch.float32)
    sizes = []
    for capacity in (1, 1000):
        cache = model.cache(model.initial_state(2), capacity)
        act(model, Segment(x, TokenIndex.range(2, LENGTH), None), cache)
        sizes.append([part.shape for layer in cache.layers for part in layer.sums] + [cache.index.shape])
    assert sizes[0] == sizes[1]


@each(SPECS)
def test_acting_equals_learning_over_a_long_episode(spec):
    """Float32 is accurate long after the gates have decayed the first tokens."""
    model, length = new_model(replace(spec, layers=1)), 300
    run = Segment(numbers(1, length, spec.width, dtype=torch.float32), TokenIndex.range(1, length), None)
    acted, _ = act(model, run, model.cache(model.initial_state(1), 1))
    torch.testing.assert_close(acted, model(run.x, run.index)[0], rtol=0, atol=1e-4)


@each(WITH_MEMORY)
def test_cache_continues_the_last_episode_of_a_state(spec):
    """The state holds two episodes and ends with an empty slot."""
    model = new_model(spec).double()
    index = TokenIndex(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), torch.tensor([[0, 0, 0, 1, 1, 1, EMPTY, 1]]))
    index = TokenIndex(torch.where(index.episode == EMPTY, 0, index.position), index.episode)
    run = Segment(numbers(1, 8, spec.width), index, None)
    _, state = model(run.x[:, :7], run.part(0, 7).index)
    y, _ = model(run.x[:, 7:], run.part(7, 8).index, state)
    assert_close_for_dtype(act(model, run.part(7, 8), model.cache(state, 7))[0], y)


# Performer.


DRAWS, ROWS, SIZE = 20_000, 8, 4
VECTORS = (torch.tensor([1.0, 0.4, 0.3, 0.8]), torch.tensor([-0.5, 1.0, 0.2, -0.9]))


def estimates(q: Tensor, k: Tensor, projections: Tensor) -> Tensor:
    """Return phi(q) . phi(k) for N draws (N, M, D) of the projection: (N,)."""
    module = Performer(DRAWS * ROWS).build(SIZE, 1).double()
    module.projection.copy_(projections.flatten(0, 1))
    a = q / SIZE**0.25
    lost = (module.projection @ a).max() - a @ a / 2
    keys = module.key_features(k.view(1, 1, 1, SIZE))
    pairs = (
        module.query_features(q.view(1, 1, 1, SIZE)) * keys.features * (lost + keys.scale[..., None]).exp()
    )
    return pairs.view(DRAWS, ROWS).mean(1)


def deviations(projections: Tensor) -> list[float]:
    """Return the error of the mean estimate of exp(q . k / sqrt(D)), in standard errors, for some q and k."""
    results = []
    for q, k in [(VECTORS[0], VECTORS[0]), VECTORS, (VECTORS[1], VECTORS[1])]:
        q, k = q.double(), k.double()
        some = estimates(q, k, projections) - (q @ k / SIZE**0.5).exp()
        results.append(abs(float(some.mean() / some.std() * DRAWS**0.5)))
    return results


def test_the_estimate_of_softmax_is_unbiased():
    rows = orthogonal_rows(DRAWS * ROWS, SIZE, torch.Generator().manual_seed(0))
    assert max(deviations(rows.double().view(DRAWS, ROWS, SIZE))) < 4


def test_estimate_without_random_signs_is_biased():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(DRAWS * ROWS // SIZE, SIZE, SIZE, generator=generator, dtype=torch.float64)
    lengths = torch.randn(DRAWS, ROWS, SIZE, generator=generator, dtype=torch.float64).norm(dim=2)
    as_they_come = torch.linalg.qr(normal)[0].reshape(DRAWS, ROWS, SIZE)
    assert max(deviations(as_they_come * lengths[..., None])) > 10


@pytest.mark.parametrize(("rows", "size"), [(10, 4), (3, 5), (1, 1), (12, 4)])
def test_blocks_of_rows_are_orthogonal(rows, size):
    drawn = orthogonal_rows(rows, size, torch.Generator().manual_seed(0)).double()
    assert drawn.shape == (rows, size)
    for block in drawn.split(size):
        products = block @ block.T
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-5)


def test_lengths_of_rows_are_those_of_normal_vectors():
    squares = orthogonal_rows(8000, 4, torch.Generator().manual_seed(0)).square().sum(1)
    assert abs(squares.mean() - 4) < 5 * (8 / 8000) ** 0.5
    assert abs(squares.var() - 8) < 1


@pytest.mark.parametrize(("size", "features"), [(1, 1), (2, 2), (8, 16), (64, 256)])
def test_default_number_of_features_is_near_d_log_d(size, features):
    assert Performer().build(2 * size, 2).projection.shape == (features, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("few", [0, 2**40], ids=["sums", "pairs"])
def test_large_queries_and_keys_are_stable(dtype, scale, few, chunks):
    """Outputs stay within the range of values, gradients are finite, and acting equals learning."""
    chunks(few)
    module = Performer().build(16, 2)
    q, k, v = ((scale * numbers(1, 2, LENGTH, 8, seed=n)).to(dtype).requires_grad_() for n in range(3))
    index = TokenIndex.range(1, LENGTH)
    y = module(q, k, v / scale, None, AttentionMask(index, index, Full(), True, dtype))
    least, most = ((v / scale).cummax(2).values, -(-v / scale).cummax(2).values)[::-1]
    assert ((y >= least - 0.05) & (y <= most + 0.05)).all()
    y.float().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    memory, steps = module.prefill(k[:, :, :0], v[:, :, :0], TokenIndex.empty(1, 0)), []
    for t in range(LENGTH):
        one = [x.detach()[:, :, t : t + 1] for x in (q, k, v / scale)]
        steps.append(module.step(*one, TokenIndex.range(1, 1, start=t), memory))
    torch.testing.assert_close(
        torch.cat(steps, dim=2), y.detach(), rtol=0, atol=1e-5 if dtype is torch.float32 else 0.02
    )


def drawn(spec: Performer, updates: int) -> list[Tensor]:
    """Return the initial projection and the one after each update."""
    module = spec.build(8, 2)
    projections = [module.projection.clone()]
    for _ in range(updates):
        module.after_update()
        projections.append(module.projection.clone())
    return projections


def test_projection_is_redrawn_at_the_interval():
    results = drawn(Performer(6, redraw=3), 7)
    changed = [not torch.equal(a, b) for a, b in pairwise(results)]
    assert changed == [False, False, True, False, False, True, False]
    assert not torch.equal(results[3], results[6])
    assert all(torch.equal(one, results[0]) for one in drawn(Performer(6), 7)[:3])


def test_redraws_continue_after_resume():
    spec = Performer(6, redraw=3)
    whole, saved = drawn(spec, 9), spec.build(8, 2)
    for _ in range(4):
        saved.after_update()
    resumed = replace(spec).build(8, 2)
    resumed.load_state_dict(saved.state_dict())
    assert torch.equal(resumed.projection, whole[4])
    for expected in whole[5:]:
        resumed.after_update()
        assert torch.equal(resumed.projection, expected)


@pytest.mark.parametrize(("kernel", "name"), [(Performer(6), "projection"), (RFA(6), "waves")])
def test_seed_determines_draws_and_layers_differ(kernel, name):
    def drawn(seed: int) -> list[Tensor]:
        model = replace(SMALL, kernel=replace(kernel, seed=seed)).build()
        return [getattr(block.attention.kernel, name) for block in model.blocks]

    assert all(torch.equal(a, b) for a, b in zip(drawn(7), drawn(7), strict=True))
    different = [*drawn(0), *drawn(7), *drawn(99)]
    assert not any(torch.equal(a, b) for a, b in combinations(different, 2))


# RFA.


def test_waves_estimate_the_gaussian_kernel():
    module = RFA(100_000, sigma=0.7).build(4, 1).double()
    q, k = numbers(1, 1, 5, 4), numbers(1, 1, 5, 4, seed=1)
    results = module.query_features(q) @ module.key_features(k).features.mT
    a, b = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    expected = (-(a[..., :, None, :] - b[..., None, :, :]).square().sum(-1) / (2 * 0.7**2)).exp()
    torch.testing.assert_close(results, expected, rtol=0, atol=5 / 100_000**0.5)


def test_quotient_is_exact_above_noise_and_continuous_below():
    """With one key and 16 draws, the noise threshold of the denominator is 1 / 2."""
    module = RFA(16).build(4, 1)
    denominator = torch.tensor([0.75, -0.75, 0.5, -0.5, 0.25, -0.25, 1e-9, -1e-9, 0.0])
    results = torch.stack([torch.full_like(denominator, 3.0), denominator, torch.ones(9)], dim=-1)
    expected = torch.tensor([4.0, -4.0, 6.0, -6.0, 3.0, -3.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(module.quotient(results)[:, 0], expected, rtol=0, atol=1e-7)
    assert (module.quotient(torch.zeros(1, 3)) == 0).all()


@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("features", [None, 32])
@given(
    drawn=segmented_index(),
    sigma=st.floats(0.25, 2.0),
    width=st.sampled_from([8, 64]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15)
def test_acting_equals_learning_for_any_sigma(gate, features, drawn, sigma, width, seed):
    """Outputs agree to 1e-5 in float32, although sums cancel for small sigma."""
    index, lengths = drawn
    kernel = RFA(features, sigma=sigma, gate=gate, gate_bias=1.0)
    spec = TransformerSpec(width=width, heads=2, layers=2, feed_forward=12, kernel=kernel)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = spec.build()
    run = Segment(numbers(*index.shape, width, seed=seed, dtype=torch.float32), index, None)
    with torch.no_grad():
        learned, _ = model(run.x, run.index)
        acted, _ = act(model, run, model.cache(model.initial_state(index.shape[0]), sum(lengths)))
    torch.testing.assert_close(acted[run.filled], learned[run.filled], rtol=0, atol=1e-5)


@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gated"])
def test_rounding_of_inputs_is_not_amplified_by_the_length(gate):
    """Inputs that differ by float32 rounding give close outputs over hundreds of tokens."""
    module = RFA(16, sigma=0.25, gate=gate).build(16, 1).double()
    length = 400
    index = TokenIndex.range(1, length)
    mask = AttentionMask(index, index, Full(), True, torch.float64)
    results = []
    for rounding in (0.0, 6e-8):
        q, k, v = (
            numbers(1, 1, length, 16, seed=n) * (1 + rounding * numbers(1, 1, length, 16, seed=n + 9))
            for n in range(3)
        )
        k = torch.cat([k, numbers(1, 1, length, 1, seed=3)], dim=-1) if gate else k
        features, keys = module.transform_in_context(q, k, mask)
        results.append(module(features, keys, v, None, mask))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)


def test_cumulative_sums_by_episode_and_position():
    """Slots are rotated as in a ring buffer, episodes are mixed, and one empty slot contains noise."""
    position = torch.tensor([[3, 0, 4, 9, 1, 2, 5]])
    episode = torch.tensor([[0, 1, 0, EMPTY, 1, 0, 0]])
    x = numbers(1, 2, 7)
    x[..., 3] = 1e30
    y = cumulative_sum_by_episode(x, TokenIndex(position, episode))
    for i in (0, 1, 2, 4, 5, 6):
        same = (episode[0] == episode[0, i]) & (position[0] <= position[0, i])
        torch.testing.assert_close(y[..., i], x[..., same].sum(-1))


@pytest.mark.parametrize("few", [0, 2**40], ids=["sums", "pairs"])
def test_gates_are_accurate_over_thousands_of_tokens_in_float32(few, chunks, monkeypatch):
    """Sums of log gates reach thousands, where plain float32 rounding would be visible."""
    chunks(few)
    monkeypatch.setattr(linear_attention, "CAUSAL_CHUNK", 128)
    module = RFA(16, sigma=2.0, gate=True).build(8, 1).double()
    length, queries = 4096, 64 if few else 4096
    q, k, v = (numbers(1, 1, length, 8, seed=n) for n in range(3))
    q, index = q[:, :, -queries:], TokenIndex.range(1, length)
    k = torch.cat([k, numbers(1, 1, length, 1, seed=3)], dim=-1)
    results = []
    for dtype in (torch.float64, torch.float32):
        mask = AttentionMask(index.last(queries), index, Full(), True, dtype)
        features, keys = module.to(dtype).transform_in_context(q.to(dtype), k.to(dtype), mask)
        results.append(module(features, keys, v.to(dtype), None, mask).double())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("gate_bias", [-40.0, 40.0])
def test_saturated_gates_are_finite(gate_bias):
    """Saturated gates keep everything or nothing, without NaN."""
    model = replace(SMALL, kernel=RFA(32, sigma=2.0, gate=True, gate_bias=gate_bias)).build()
    x = numbers(2, LENGTH, SMALL.width, dtype=torch.float32).requires_grad_()
    y, _ = model(x, TokenIndex.range(2, LENGTH))
    acted, _ = act(
        model, Segment(x.detach(), TokenIndex.range(2, LENGTH), None), model.cache(model.initial_state(2), 1)
    )
    assert_close_for_dtype(acted, y.detach())
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kernel": RFA(gate=True), "causal": False},
            r"RFA\(.*gate=True.*\) has a gate .*requires causal=True",
        ),
        ({"kernel": RFA(gate=True), "cross_attention": True}, r"RFA\(.*gate=True.*\) .*cross_attention=True"),
    ],
)
def test_gated_rfa_requires_causal_self_attention(options, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **options)
