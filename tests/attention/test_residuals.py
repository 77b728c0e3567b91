"""What the gates promise beside their formulas."""

import pytest
import torch

from rlxf.attention import Add, GRUGate, HighwayGate, InputGate, OutputGate, Reversible, SigTanhGate
from rlxf.attention.techniques import TECHNIQUES
from tests.attention.oracle import close
from tests.attention.worlds import numbers

WIDTH = 6
BIASED = (GRUGate, OutputGate, HighwayGate, SigTanhGate)
X, Y = numbers(3, 4, WIDTH), numbers(3, 4, WIDTH, seed=1)


def gates() -> list[type]:
    return [technique for technique in TECHNIQUES["residual"].values() if technique not in (Add, Reversible)]


def module(technique):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return technique.build(WIDTH, 2).double()


def test_add_is_the_sum():
    assert torch.equal(module(Add())(X, Y), X + Y)


@pytest.mark.parametrize("gate", gates())
def test_a_relu_stands_before_every_gate(gate):
    built = module(gate())
    assert (Y < 0).any()
    assert torch.equal(built(X, Y), built.gate(X, Y.relu()))


@pytest.mark.parametrize("gate", BIASED)
def test_a_large_bias_lets_the_stream_through(gate):
    close(module(gate(bias=100.0))(X, Y), X, 1e-12)


@pytest.mark.parametrize("gate", BIASED)
def test_the_default_is_near_the_stream_and_a_bias_of_0_is_not(gate):
    def moved(technique):
        return (module(technique)(X, Y) - X).abs().mean()

    assert moved(gate()) < 0.5 * moved(gate(bias=0.0))


def test_no_setting_of_the_input_gate_is_the_identity():
    """It adds y as it is."""
    built = module(InputGate())
    close(built(X, Y) - built(X, 0 * Y), Y.relu())


@pytest.mark.parametrize("gate", BIASED)
def test_a_whole_number_is_a_bias(gate):
    assert torch.equal(module(gate(bias=1))(X, Y), module(gate(bias=1.0))(X, Y))


@pytest.mark.parametrize("technique", TECHNIQUES["residual"].values())
def test_gradients(technique):
    built = module(technique())
    x, y = X[0, :2].clone().requires_grad_(), Y[0, :2].clone().requires_grad_()
    parameters = dict(built.named_parameters())

    def joined(x, y, *values):
        return torch.func.functional_call(built, dict(zip(parameters, values, strict=True)), (x, y))

    assert torch.autograd.gradcheck(joined, (x, y, *parameters.values()))
