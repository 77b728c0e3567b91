"""Bounded growth of recurrent states: 10,000 steps in float32, and limits of the parameters."""

import math

import pytest
import torch

from rlxf.attention import SHM, DeltaNet, TransformerSpec, Window
from rlxf.attention.parameter_checks import parameter_fault
from rlxf.attention.recurrent.base import (
    LARGEST_GAIN,
    LARGEST_LOG_GAIN,
    EpisodeRuns,
    RecurrentMixer,
    all_within,
)
from rlxf.attention.recurrent.heads import unit_norm
from rlxf.attention.recurrent.lru import LRU, MAX_RADIUS
from rlxf.attention.token_index import EMPTY, TokenIndex
from tests.attention.recurrent.mixers import HEADS, TECHNIQUES, WIDTH, by_steps

STEPS, SEGMENT = 10_000, 1_000
LIMITS = {
    (name, parameter): limit
    for name, technique in TECHNIQUES.items()
    for parameter, limit in technique.build(WIDTH, HEADS).limits.items()
}
each_limit = pytest.mark.parametrize(("name", "parameter"), LIMITS)
LAST = -1


def initial(name: str) -> RecurrentMixer:
    """Build a mixer as an agent does, with its initial weights in float32."""
    torch.manual_seed(0)
    return TECHNIQUES[name].build(WIDTH, HEADS)


def segment(start: int) -> torch.Tensor:
    """Return 1,000 tokens of three rows: random, constant, and constant and negative."""
    random = torch.randn(SEGMENT, WIDTH, generator=torch.Generator().manual_seed(start))
    return torch.stack([random, torch.ones(SEGMENT, WIDTH), torch.full((SEGMENT, WIDTH), -2.0)])


def assert_finite_for_10000_steps(mixer: RecurrentMixer) -> None:
    state, episode = mixer.initial_state(3), torch.full((3,), EMPTY)
    for start in range(0, STEPS, SEGMENT):
        index = TokenIndex.range(3, SEGMENT, start=start)
        with torch.no_grad():
            y, state = mixer(segment(start), EpisodeRuns.of(index, episode), state)
        episode = torch.zeros(3, dtype=torch.long)
        assert y.isfinite().all()
        assert all(x.isfinite().all() for x in state.values())


def test_norm_of_zeros_in_float16_has_finite_gradients():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float16, requires_grad=True)
    y = unit_norm(x)
    torch.testing.assert_close(y.detach(), torch.tensor([[0.0, 0.0], [0.6, 0.8]]))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("name", ["MinGRU", "SHM"])
def test_states_of_bfloat16_weights_keep_their_time_constants(name):
    """In bfloat16, ``1 - z`` is 1 for gates below 2^-9, and a state would grow without limit."""
    mixer = initial(name).bfloat16()
    x, runs = torch.ones(1, 3000, WIDTH), EpisodeRuns.of(TokenIndex.range(1, 3000), torch.full((1,), EMPTY))
    with torch.no_grad():
        _, state = mixer(x.bfloat16(), runs, mixer.initial_state(1))
        _, expected = mixer.float()(x, runs, mixer.initial_state(1))
    torch.testing.assert_close(state, expected, rtol=0.05, atol=0.05)


def test_saturated_gates_of_agalite_keep_the_digits_of_small_decays():
    """``1 - gamma`` and ``1 - beta`` are about e^-15, which float32 loses next to 1."""
    mixer = TECHNIQUES["AGaLiTe"].build(WIDTH, HEADS)
    with torch.no_grad():
        for projection in (mixer.features, mixer.expansions):
            projection.weight.zero_()
        mixer.features.bias.view(HEADS, 5, -1)[:] = torch.tensor([-1.0, 1.0, 0.0, 15.0, 15.0])[None, :, None]
        mixer.expansions.bias.fill_(15.0)
    runs, state = EpisodeRuns.of(TokenIndex.range(1, 1, start=3), torch.zeros(1, dtype=torch.long)), {}
    for dtype in (torch.float32, torch.float64):
        before = {name: torch.ones_like(x) for name, x in mixer.to(dtype).initial_state(1).items()}
        state[dtype] = mixer(torch.zeros(1, 1, WIDTH, dtype=dtype), runs, before)[1]
    for name, expected in state[torch.float64].items():
        assert 0 < expected.min() <= expected.max() < 1e-6
        torch.testing.assert_close(state[torch.float32][name].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_initial_parameters_keep_states_finite_for_10000_steps(name):
    assert_finite_for_10000_steps(initial(name))


def test_products_of_the_initial_hadamard_factors_do_not_grow():
    """A constant token has the largest product; it grows only within a cycle through the rows of theta."""
    torch.manual_seed(0)
    mixer = SHM().build(WIDTH, HEADS)
    theta = mixer.theta[mixer.spec.row(torch.arange(STEPS))].detach().double()
    features = torch.tensor([-3.0, -1.0, -0.3, -0.1, 0.1, 0.3, 1.0, 3.0])
    product = (theta[..., None] * features).tanh().log1p().cumsum(dim=0)
    assert product[LAST].max() < 0
    assert product.max() < 10


def doubling_memory() -> RecurrentMixer:
    """Return an `SHM` whose state doubles with each token whose first feature is 1."""
    mixer = initial("SHM")
    with torch.no_grad():
        mixer.theta.fill_(10.0)
        mixer.calibration.weight.zero_()[:, 0] = 10.0
    return mixer


def outputs_in_both_ways(mixer: RecurrentMixer, x: torch.Tensor, index: TokenIndex) -> list[torch.Tensor]:
    """Return the outputs of a segment, and those of the same tokens one by one."""
    none, state = torch.full((1,), EMPTY), mixer.initial_state(1)
    return [mixer(x, EpisodeRuns.of(index, none), state)[0], by_steps(mixer, x, index, state, none)[0]]


def test_doubling_factors_keep_an_empty_hadamard_memory_empty():
    """Products of 300 factors exceed float32, but no state does."""
    mixer, x = doubling_memory(), torch.ones(1, 300, WIDTH)
    torch.nn.init.zeros_(mixer.value.weight)
    expected = mixer.output(mixer.shortcut(x))
    for y in outputs_in_both_ways(mixer, x, TokenIndex.range(1, 300)):
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)


def test_hadamard_memory_that_overflows_leaves_the_next_episode_unchanged():
    mixer, boundary = doubling_memory(), 200
    x = torch.randn(1, 250, WIDTH, generator=torch.Generator().manual_seed(0))
    x[..., 0] = torch.where(torch.arange(250) < boundary, 1.0, -1.0)
    x.requires_grad_()
    position = torch.cat([torch.arange(boundary), torch.arange(50)])[None]
    index = TokenIndex(position, (torch.arange(250) >= boundary).long()[None])
    alone = mixer(
        x[:, boundary:],
        EpisodeRuns.of(index.at(slice(boundary, None)), torch.tensor([EMPTY])),
        mixer.initial_state(1),
    )[0]
    expected = torch.autograd.grad(alone.square().sum(), x)[0]
    for y in outputs_in_both_ways(mixer, x, index):
        assert not y[:, :boundary].isfinite().all()
        torch.testing.assert_close(y[:, boundary:], alone, rtol=1e-5, atol=1e-5)
        gradient = torch.autograd.grad(y[:, boundary:].square().sum(), x)[0]
        torch.testing.assert_close(gradient[:, boundary:], expected[:, boundary:], rtol=1e-4, atol=1e-5)


@each_limit
def test_parameters_at_their_limit_keep_states_finite_for_10000_steps(name, parameter):
    mixer = initial(name)
    torch.nn.init.constant_(mixer.get_parameter(parameter), LIMITS[name, parameter])
    assert_finite_for_10000_steps(mixer)


@each_limit
def test_parameters_at_their_limit_have_finite_gradients(name, parameter):
    mixer = initial(name)
    torch.nn.init.constant_(mixer.get_parameter(parameter), LIMITS[name, parameter])
    runs = EpisodeRuns.of(TokenIndex.range(3, SEGMENT), torch.full((3,), EMPTY))
    y, _ = mixer(segment(0), runs, mixer.initial_state(3))
    y.mean().backward()
    assert all(x.grad.isfinite().all() for x in mixer.parameters() if x.grad is not None)


def transformer(name):
    torch.manual_seed(0)
    return TransformerSpec(width=WIDTH, heads=HEADS, layers=2, recurrence=TECHNIQUES[name]).build()


@each_limit
def test_parameters_above_their_limit_are_named_with_their_layer(name, parameter):
    model, limit = transformer(name), LIMITS[name, parameter]
    assert parameter_fault(model) is None
    with torch.no_grad():
        weight = model.blocks[1].mixer.get_parameter(parameter)
        weight.view(-1)[0] = limit * 0.999
        assert parameter_fault(model) is None
        weight.view(-1)[0] = limit * 1.01
    message = parameter_fault(model)
    assert f"'mixer.{parameter}' of layer 2, {model.spec.recurrence}, contains {limit * 1.01:.6g}" in message
    assert f"more than {limit:.4g} can make the state exceed float32" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_parameters_that_are_not_finite_are_named_with_their_layer(name, value):
    model = transformer(name)
    for parameter, weight in list(model.blocks[0].named_parameters()):
        with torch.no_grad():
            weight.view(-1)[LAST], kept = value, weight.view(-1)[LAST].clone()
            message = parameter_fault(model)
            weight.view(-1)[LAST] = kept
        owner = f"{parameter!r} of layer 1, {model.spec.recurrence},"
        assert message == f"the parameter {owner} contains {value}; it must be finite"
    assert parameter_fault(model) is None


def test_parameters_of_attention_and_of_no_layer_are_named():
    model = TransformerSpec(width=8, heads=2, pattern=Window(3)).build()
    for name, owner in {"blocks.1.attention.qkv.weight": "layer 2", "norm.bias": "the transformer"}.items():
        with torch.no_grad():
            weight = model.get_parameter(name)
            weight.view(-1)[0] = math.nan
            assert f"of {owner} contains nan" in parameter_fault(model)
            weight.view(-1)[0] = 0.0


def test_given_tensors_are_checked_in_place_of_the_parameters():
    model = transformer("LRU")
    stored = {name: x.clone() for name, x in model.state_dict().items()}
    stored["blocks.0.mixer.gamma_log"][3] = 200.0
    assert "contains 200" in parameter_fault(model, stored)
    assert parameter_fault(model) is None
    assert parameter_fault(model, {"unknown": torch.full((1,), math.nan)}) is None


def test_limits_are_those_of_existing_parameters():
    assert {name for name, _ in LIMITS} == {"LRU", "GatedDeltaNet", "Mamba2", "Mamba2 without convolution"}
    assert set(LIMITS.values()) == {LARGEST_GAIN, LARGEST_LOG_GAIN}
    square = (LARGEST_GAIN * STEPS * 1000) ** 2
    assert square == pytest.approx(torch.finfo(torch.float32).max)


def test_radius_that_rounds_to_1_is_refused():
    with pytest.raises(ValueError, match=r"LRU max_radius must be .* at most 0.99999904.*, got 0.99999999"):
        LRU(max_radius=0.99999999)
    with pytest.raises(ValueError, match=r"LRU min_radius must be from 0 to below 0.5, got 0.5"):
        LRU(min_radius=0.5, max_radius=0.5)
    with pytest.raises(ValueError, match=r"LRU max_phase must be above 0 and at most 6.28.*, got 7"):
        LRU(max_phase=7)
    torch.manual_seed(0)
    mixer = LRU(min_radius=0.0, max_radius=MAX_RADIUS).build(512, HEADS)
    assert all(x.isfinite().all() for x in mixer.parameters())


def test_a_state_of_delta_rules_is_bounded_in_bfloat16():
    """Keys are divided by their norm: were the result rounded, its norm could exceed 1 and the state grow."""
    torch.manual_seed(2)
    spec = TransformerSpec(width=32, heads=4, layers=1, recurrence=DeltaNet(negative_eigenvalues=True))
    model = spec.build().eval()
    token = torch.randn(1, 1, 32)
    normalized = model.blocks[0].mixer_norm.norm(token)[0, 0]
    state = None
    with torch.no_grad():
        model.blocks[0].mixer.beta.weight.copy_((8 * normalized / normalized.square().sum()).expand(4, -1))
        model = model.bfloat16()
        for start in range(0, 8 * SEGMENT, SEGMENT):
            tokens = token.bfloat16().expand(1, SEGMENT, 32)
            _, state = model(tokens, TokenIndex.range(1, SEGMENT, start), state)
    assert state.recurrent.passes[0]["state"].abs().max() < 10


@pytest.mark.parametrize(
    ("value", "most", "within"),
    [
        *((2.0, 2.0, True), (-2.0, 2.0, True), (3e38, math.inf, True), (0.0, math.inf, True)),
        *((2.1, 2.0, False), (-2.1, 2.0, False)),
        *((math.nan, math.inf, False), (math.inf, math.inf, False), (-math.inf, math.inf, False)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_value_decides_whether_all_are_within_a_bound(value, most, within, dtype):
    x = torch.zeros(3, 5, 40, dtype=dtype)
    x[1, 4, 39] = value
    assert all_within(x, most) is within
    assert all_within(x.mT, most) is within


def test_all_of_no_values_and_of_integers_are_within_any_bound():
    assert all_within(torch.empty(0, 3), 0.0)
    assert all_within(torch.full((3,), 5), 1.0)
