"""DA-Transformer reproduces the weights of distances, and attention with them."""

import math

import pytest
import torch

from rlxf.attention import DistanceAware, Full, TokenIndex
from rlxf.attention.attention import Attention
from rlxf.attention.attention_mask import AttentionMask
from rlxf.attention.positions.distance_aware import DistanceAwareBias
from tests.attention.oracle import close, load, put
from tests.attention.passes import attend, over_heads

VECTOR = load("da_transformer")
BATCH, HEADS, LENGTH, SIZE = VECTOR["in_q"].shape


def attention() -> Attention:
    module = over_heads(VECTOR["in_q"], DistanceAware())
    put(module.position.alpha, VECTOR["w_alpha"])
    put(module.position.beta, VECTOR["w_beta"])
    return module


def test_weights_of_distances():
    position = torch.arange(LENGTH)
    distances = position[:, None] - position
    table = attention().position.table(distances.flatten(), None)
    close(table.unflatten(-1, (LENGTH, LENGTH)), VECTOR["out_f"])


@pytest.mark.parametrize(("causal", "out"), [(False, "out"), (True, "out_causal")])
def test_attention(causal, out):
    q, k, v = (VECTOR[f"in_{name}"] for name in "qkv")
    module, index = attention(), TokenIndex.range(BATCH, LENGTH)
    mask = AttentionMask(index, index, Full(), causal, q.dtype)
    table = module.position.table(mask.relative.distances, None)
    y = attend(module, q, k, v, mask, table)
    close(y, VECTOR[out].transpose(1, 2).flatten(2))


@pytest.mark.parametrize("beta", [-105.0, -3.0, 0.0, 50.0, 105.0])
def test_large_beta_in_float32(beta):
    """``1 + e^beta`` overflows above 88; f is close to ``e^x`` there."""
    position = DistanceAwareBias(2)
    put(position.beta, torch.tensor([beta, beta]))
    put(position.alpha, torch.tensor([-0.5, 0.5]))
    x = position.alpha.detach().double()[:, None] * torch.arange(9)
    expected = (1 + math.exp(beta)) / (1 + (beta - x).exp())
    actual = position.table(torch.arange(9), None)
    close(actual.double(), expected, 1e-4)
    actual.sum().backward()
    assert position.alpha.grad.isfinite().all()
    assert position.beta.grad.isfinite().all()


def test_gradients_of_far_distances_are_finite():
    """``e^(beta - x)`` overflows in heads with alpha < 0."""
    position = attention().position.float()
    put(position.alpha, torch.tensor([-1.0, 1.0])[torch.arange(HEADS) % 2])
    position.table(torch.tensor([1000]), None).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in position.parameters())
