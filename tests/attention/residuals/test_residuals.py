"""Tests of properties of residual connections and gates."""

import pytest
import torch

from rlxf.attention import Add, GRUGate, HighwayGate, InputGate, OutputGate, Reversible, SigTanhGate
from rlxf.attention.registry import TECHNIQUES
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
def test_gates_apply_relu_to_the_sublayer_output(gate):
    built = module(gate())
    assert (Y < 0).any()
    assert torch.equal(built(X, Y), built.gate(X, Y.relu()))


@pytest.mark.parametrize("gate", BIASED)
def test_large_bias_gives_the_identity(gate):
    close(module(gate(bias=100.0))(X, Y), X, 1e-12)


@pytest.mark.parametrize("gate", BIASED)
def test_default_bias_is_close_to_the_identity(gate):
    def mean_change(technique):
        return (module(technique)(X, Y) - X).abs().mean()

    assert mean_change(gate()) < 0.5 * mean_change(gate(bias=0.0))


def test_input_gate_adds_the_sublayer_output():
    """The sublayer output is added without a gate."""
    built = module(InputGate())
    close(built(X, Y) - built(X, 0 * Y), Y.relu())


@pytest.mark.parametrize("gate", BIASED)
def test_integer_bias_is_accepted(gate):
    assert torch.equal(module(gate(bias=1))(X, Y), module(gate(bias=1.0))(X, Y))


@pytest.mark.parametrize("technique", TECHNIQUES["residual"].values())
def test_gradients_are_correct(technique):
    built = module(technique())
    x, y = X[0, :2].clone().requires_grad_(), Y[0, :2].clone().requires_grad_()
    parameters = dict(built.named_parameters())

    def combine(x, y, *values):
        return torch.func.functional_call(built, dict(zip(parameters, values, strict=True)), (x, y))

    assert torch.autograd.gradcheck(combine, (x, y, *parameters.values()))
