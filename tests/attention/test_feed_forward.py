"""The feed-forward sublayer in chunks: the same numbers, and less in between at a time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlxf.attention import Index, Transformer
from rlxf.attention.feed_forward import FeedForward
from tests.attention.oracle import close
from tests.attention.specs import DEFAULT, fresh
from tests.attention.test_gathering import Largest
from tests.attention.worlds import numbers

TOKENS = 10


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("chunk", [1, 3, 5, TOKENS, 4 * TOKENS])
def test_chunks_change_no_number(activation, chunk):
    whole = fresh(replace(DEFAULT, activation=activation)).double()
    parts = replace(DEFAULT, activation=activation, feed_forward_chunk=chunk).build().double()
    parts.load_state_dict(whole.state_dict())
    for one, other in zip(outcome(parts), outcome(whole), strict=True):
        close(one, other)


def outcome(model: Transformer) -> list[Tensor]:
    """Outputs and all gradients."""
    x = numbers(2, TOKENS, DEFAULT.width).requires_grad_()
    y, _ = model(x, Index.range(2, TOKENS))
    return [y, *torch.autograd.grad((y * numbers(*y.shape, seed=1)).sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("learning", [True, False], ids=["learning", "acting"])
def test_what_lies_in_between_is_never_there_for_more_than_a_chunk(learning):
    width, inner, chunk = 4, 64, 8
    module = FeedForward(width, inner, "relu", chunk)
    x = torch.randn(1, 16 * chunk, width, requires_grad=learning)
    with Largest() as largest, torch.set_grad_enabled(learning):
        y = module(x)
        if learning:
            y.sum().backward()
    assert chunk * inner <= largest.size <= max(chunk * inner, x.numel())
