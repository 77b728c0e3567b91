"""Tests of the chunked feed-forward sublayer and its memory."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rlxf.attention import TokenIndex, Transformer
from rlxf.attention.feed_forward import FeedForward, build_feed_forward
from rlxf.attention.linear import bound
from tests.attention.largest_tensor import LargestTensor
from tests.attention.oracle import close
from tests.attention.specs import DEFAULT, new_model
from tests.attention.worlds import numbers

TOKENS = 10


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("chunk", [1, 3, 5, TOKENS, 4 * TOKENS])
def test_chunked_equals_unchunked(activation, chunk):
    whole = new_model(replace(DEFAULT, activation=activation)).double()
    parts = replace(DEFAULT, activation=activation, feed_forward_chunk=chunk).build().double()
    parts.load_state_dict(whole.state_dict())
    for one, other in zip(outcome(parts), outcome(whole), strict=True):
        close(one, other)


def outcome(model: Transformer) -> list[Tensor]:
    """Return outputs and all gradients."""
    x = numbers(2, TOKENS, DEFAULT.width).requires_grad_()
    y, _ = model(x, TokenIndex.range(2, TOKENS))
    return [y, *torch.autograd.grad((y * numbers(*y.shape, seed=1)).sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("learning", [True, False], ids=["learning", "acting"])
def test_hidden_activations_exist_for_one_chunk_at_a_time(learning):
    width, inner, chunk = 4, 64, 8
    module = FeedForward(width, inner, "relu", chunk)
    x = torch.randn(1, 16 * chunk, width, requires_grad=learning)
    with LargestTensor() as largest, torch.set_grad_enabled(learning):
        y = module(x)
        if learning:
            y.sum().backward()
    assert chunk * inner <= largest.size <= max(chunk * inner, x.numel())


class Adapter(nn.Module):
    """Layer with a low-rank addition, which also has the weight and bias of the layer, as in LoRA."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_an_adapter_of_the_inner_layer_is_called(activation):
    network = build_feed_forward(8, 16, activation, None).eval()
    x = numbers(2, TOKENS, 8).float()
    merged = deepcopy(network)
    network.inner = adapter = Adapter(network.inner)
    with torch.no_grad():
        merged.inner.weight += adapter.up @ adapter.down
    torch.testing.assert_close(network(x), merged(x))
    torch.testing.assert_close(bound(network)(x), merged(x))
    network(x).sum().backward()
    assert adapter.up.grad.any()


def test_the_output_of_an_adapter_is_not_changed_in_place():
    network = FeedForward(8, 16, "relu")
    network.inner = nn.Sequential(network.inner, nn.Tanh())
    network(numbers(2, 3, 8).float()).sum().backward()
    assert network.inner[0].weight.grad.any()


def test_a_hook_of_the_inner_layer_is_called():
    network = FeedForward(8, 16, "relu")
    network.inner.register_forward_hook(lambda layer, arguments, y: y * 0)
    torch.testing.assert_close(network(numbers(2, 3, 8).float()), torch.zeros(2, 3, 8))
