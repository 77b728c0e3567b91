"""Tests of dropout."""

import pytest
import torch

from rlxf.attention.dropout import Dropout, dropout
from tests.attention.oracle import close

MANY = 1_000_000


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_drop_rate_and_mean(probability):
    y = dropout(torch.ones(MANY), probability)
    deviation = (probability * (1 - probability) / MANY) ** 0.5
    assert abs((y == 0).float().mean() - probability) < 5 * deviation + 2**-17
    close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - probability)), 1e-4)
    assert abs(y.double().mean() - 1) < 5 * deviation / (1 - probability)


def test_entries_are_dropped_independently():
    """Four entries share a random number, but pairs of entries are uncorrelated."""
    dropped = (dropout(torch.ones(MANY), 0.1).view(-1, 8) == 0).double()
    correlation = torch.corrcoef(dropped.T) - torch.eye(8)
    assert correlation.abs().max() < 5 * (MANY / 8) ** -0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 5), (0, 4)], ids=str)
def test_shape_and_dtype_are_preserved(dtype, shape):
    y = dropout(torch.ones(shape, dtype=dtype), 0.5)
    assert y.shape == shape
    assert y.dtype == dtype
    assert ((y == 0) | (y == 2)).all()


def test_gradient_uses_the_same_mask():
    x = torch.randn(100, 10, requires_grad=True)
    y = dropout(x, 0.3)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    close(gradient * x, y, 1e-6)


def test_seed_determines_the_mask():
    def drawn(seed):
        torch.manual_seed(seed)
        return dropout(torch.ones(99), 0.5)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_probability_close_to_one_is_finite():
    assert dropout(torch.ones(MANY), 1 - 1e-9).isfinite().all()


def test_dropout_is_active_in_training_only():
    layer, x = Dropout(0.5), torch.ones(99)
    assert torch.equal(layer.eval()(x), x)
    assert not torch.equal(layer.train()(x), x)
    assert torch.equal(Dropout(0.0).train()(x), x)
