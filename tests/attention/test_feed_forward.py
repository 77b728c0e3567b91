"""Tests of the chunked feed-forward sublayer and its memory."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlxf.attention import TokenIndex, Transformer
from rlxf.attention.feed_forward import FeedForward
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
